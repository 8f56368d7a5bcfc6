"""What a link check found, and how the ranks tell it: one file of JSON lines per rank, in the private directory."""

from __future__ import annotations

import json
import re
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

_ROOT_CAUSE = re.compile(r"Root Cause.*?\brank\s*:\s*(\d+).*?exitcode\s*:\s*(-?\d+)", re.DOTALL)
_CONSEQUENCE = re.compile(r"connection (closed|reset)|closed by (remote )?peer|broken pipe|heartbeat", re.IGNORECASE)
_TAIL_LINES = 12


@dataclass(frozen=True)
class Rates:
    """Verified and timed collectives of one backend.

    Args:
        megabytes: size of each rank's buffer, 10^6 bytes.
        all_reduce, all_to_all: bus bandwidth, 10^9 bytes per second; None for one rank, which has no link.
        latency: microseconds of an all-reduce of four bytes.
    """

    backend: str
    ranks: int
    megabytes: int
    all_reduce: float | None
    all_to_all: float | None
    latency: float


@dataclass(frozen=True)
class LinkCheck:
    """Outcome of one check.

    Args:
        devices: a PoolSpec as text.
        rates: one entry per backend that passed.
        failure: what went wrong, one sentence without its full stop; None when everything passed.
        timed_out: it had not ended when its time was up.
        output: last lines of what the ranks printed, when it failed.
        seconds: what the check took, the start of the ranks included.
    """

    devices: str
    rates: tuple[Rates, ...] = ()
    failure: str | None = None
    timed_out: bool = False
    output: str = ""
    seconds: float = 0.0


class Journal:
    """A rank's file: the stage that it is in, and at the end its rates or its failure."""

    def __init__(self, directory: Path, rank: int):
        self._path = directory / f"rank-{rank}.jsonl"

    def stage(self, name: str) -> None:
        """From now on the rank is `name`: "joining the process group"."""
        self._append({"stage": name})

    def failure(self, error: BaseException) -> None:
        """The end, not reached."""
        text = " ".join(line.strip() for line in str(error).splitlines() if line.strip())
        self._append({"failure": f"{type(error).__name__}: {text[:400]}".rstrip(": ")})

    def rates(self, rates: list[Rates]) -> None:
        """The end, reached."""
        self._append({"rates": [asdict(rate) for rate in rates]})

    def _append(self, entry: dict[str, Any]) -> None:
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps({"time": time.time(), **entry}) + "\n")


@dataclass(frozen=True)
class Account:
    """What one rank's journal amounts to."""

    rank: int
    stage: str = "starting Python"
    failure: str | None = None
    failed_at: float = 0.0
    rates: tuple[Rates, ...] | None = None


def read_account(directory: Path, rank: int) -> Account:
    """Read a rank's journal, also one that breaks off in the middle of a line."""
    path = directory / f"rank-{rank}.jsonl"
    account: dict[str, Any] = {}
    for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else ():
        try:
            entry = json.loads(line)
        except ValueError:
            break
        if "stage" in entry:
            account["stage"] = entry["stage"]
        elif "failure" in entry:
            account |= {"failure": entry["failure"], "failed_at": entry["time"]}
        elif "rates" in entry:
            account["rates"] = tuple(Rates(**rates) for rates in entry["rates"])
    return Account(rank, **account)


def judge(accounts: list[Account], exit_code: int | None, limit_seconds: float, output: str) -> LinkCheck:
    """Make one outcome of all ranks' accounts. `exit_code` is torchrun's, None if its time was up.

    The first failure is the one to blame: the other ranks only notice that somebody is gone.
    """
    tail = "\n".join(output.splitlines()[-_TAIL_LINES:])
    rates = accounts[0].rates
    if exit_code == 0 and rates is not None and all(account.rates is not None for account in accounts):
        return LinkCheck("", rates)
    if exit_code is None:
        where = "; ".join(f"rank {account.rank} was {account.stage}" for account in accounts if account.rates is None)
        hung = f"The collectives did not finish within {limit_seconds:.0f} seconds: {where or 'torchrun did not end'}"
        return LinkCheck("", failure=hung, timed_out=True, output=tail)
    return LinkCheck("", failure=_blame(accounts, exit_code, output), output=tail)


def _blame(accounts: list[Account], exit_code: int, output: str) -> str:
    failed = sorted((account for account in accounts if account.failure), key=lambda account: account.failed_at)
    told = next((account for account in failed if not _CONSEQUENCE.search(account.failure or "")), None)
    if told is not None:
        return f"Rank {told.rank} failed while {told.stage}: {told.failure}"
    cause = _ROOT_CAUSE.search(output)
    if cause is not None:
        rank, code = int(cause[1]), int(cause[2])
        how = f"was ended by signal {-code}" if code < 0 else f"ended with exit code {code}"
        return f"Rank {rank} {how} while {accounts[rank].stage}"
    if failed:
        return f"Rank {failed[0].rank} failed while {failed[0].stage}: {failed[0].failure}"
    return f"The ranks' parent (torchrun) ended with code {exit_code} before the ranks could say anything"
