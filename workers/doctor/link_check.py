"""The check of the links: ranks that exchange numbers, bounded in time, and what their accounts amount to."""

from __future__ import annotations

import contextlib
import json
import os
import re
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..launch import OWN_SESSION, PoolSpec, rank_commands, rank_environment
from ..leftovers import KILL_SECONDS, die_with_parent, make_folder

_POLL_SECONDS = 0.05
_TAIL_LINES = 12
_CONSEQUENCE = re.compile(r"connection (closed|reset)|closed by (remote )?peer|broken pipe|heartbeat", re.IGNORECASE)


@dataclass(frozen=True)
class LinkCheck:
    """Outcome of one check: `rate` is 10^9 bytes per second in an all-to-all of `megabytes` of each rank, `latency` µs
    of the smallest one; or a `failure`, one sentence without its full stop, with the last lines that ranks printed."""

    devices: str
    backend: str = ""
    megabytes: int = 0
    rate: float = 0.0
    latency: float = 0.0
    failure: str | None = None
    output: str = ""


def check_links(spec: PoolSpec, limit_seconds: float, rank_module: str = "workers.doctor.link_rank") -> LinkCheck:
    """Exchange numbers between the devices, one rank each, in the environment that the pool's ranks have."""
    deadline = time.monotonic() + limit_seconds
    with contextlib.closing(make_folder()) as private:
        folder = private.path
        with (folder / "output").open("wb") as output, _ranks(spec, folder, output, rank_module) as ranks:
            codes = [rank.poll() for rank in ranks]
            while not any(codes) and None in codes and time.monotonic() < deadline:
                time.sleep(_POLL_SECONDS)
                codes = [rank.poll() for rank in ranks]
        accounts = [_read(folder / f"rank-{rank}.jsonl") for rank in range(spec.world_size)]
        printed = (folder / "output").read_text(encoding="utf-8", errors="replace")
    failure = find_failure(accounts, codes, limit_seconds)
    if failure is None:
        return LinkCheck(str(spec), **accounts[0]["found"])
    return LinkCheck(str(spec), failure=failure, output="\n".join(printed.splitlines()[-_TAIL_LINES:]))


@contextlib.contextmanager
def _ranks(spec: PoolSpec, folder: Path, output: Any, module: str) -> Iterator[list[subprocess.Popen[bytes]]]:
    """Processes that are gone on leaving: they hold nothing that wants an orderly end."""
    environment, doctor = rank_environment(spec, folder, os.environ), os.getpid()
    common: dict[str, Any] = {"stdout": output, "stderr": output, "preexec_fn": lambda: die_with_parent(doctor)}
    ranks: list[subprocess.Popen[bytes]] = []
    try:
        for command, own in rank_commands(spec, module):
            ranks.append(subprocess.Popen(command, env=environment | own, **common, **OWN_SESSION))
        yield ranks
    finally:
        for process in ranks:
            process.kill()
        for process in ranks:
            with contextlib.suppress(subprocess.TimeoutExpired):  # one inside of a driver may take its time
                process.wait(KILL_SECONDS)


def find_failure(accounts: list[dict[str, Any]], codes: list[int | None], limit_seconds: float) -> str | None:
    """The first failure is the one to blame: the others notice that somebody is gone. A code of None: it still ran."""
    ranks = range(len(accounts))
    failed = sorted((rank for rank in ranks if "failure" in accounts[rank]), key=lambda rank: accounts[rank]["time"])
    own = [rank for rank in failed if not _CONSEQUENCE.search(accounts[rank]["failure"])]
    ended = [rank for rank in ranks if codes[rank] and rank not in failed]
    for rank in own or (failed if not ended else ()):
        return f"Rank {rank} failed while {accounts[rank]['stage']}: {accounts[rank]['failure']}"
    for rank in ended:
        code = codes[rank] or 0
        how = f"was ended by signal {-code}" if code < 0 else f"ended with exit code {code}"
        return f"Rank {rank} {how} while {accounts[rank]['stage']}"
    where = "; ".join(f"rank {rank} was {accounts[rank]['stage']}" for rank in ranks if "found" not in accounts[rank])
    return f"The collectives did not finish within {limit_seconds:.0f} seconds: {where}" if where else None


def _read(path: Path) -> dict[str, Any]:
    account: dict[str, Any] = {"stage": "starting Python"}
    for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else ():
        with contextlib.suppress(ValueError):  # killed while it wrote
            account |= json.loads(line)
    return account
