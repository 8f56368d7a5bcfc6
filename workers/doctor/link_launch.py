"""Starting the ranks of a link check, bounding their time, and leaving nothing of them behind."""

from __future__ import annotations

import contextlib
import os
import subprocess
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from ..launch import PACK_ROOT, PoolSpec, rank_environment, torchrun_command
from ..leftovers import private_folder
from ..link_result import LinkCheck, judge, read_account
from ..processes import end_tree


def check_links(spec: PoolSpec, limit_seconds: float, rank_module: str = "workers.doctor.link_check") -> LinkCheck:
    """Run real collectives over the devices, in the environment that the pool's ranks have.

    Args:
        spec: devices, one rank each.
        limit_seconds: for everything, the start of Python included; then all ranks are ended.
        rank_module: what each rank runs.
    """
    start = time.monotonic()
    with private_folder() as directory:
        with _torchrun(spec, directory, rank_module) as torchrun:
            exit_code: int | None
            try:
                exit_code = torchrun.wait(limit_seconds)
            except subprocess.TimeoutExpired:
                exit_code = None
        accounts = [read_account(directory, rank) for rank in range(spec.world_size)]
        output = (directory / "output").read_text(encoding="utf-8", errors="replace")
        outcome = judge(accounts, exit_code, limit_seconds, output)
    return replace(outcome, devices=str(spec), seconds=time.monotonic() - start)


@contextlib.contextmanager
def _torchrun(spec: PoolSpec, directory: Path, rank_module: str) -> Iterator[subprocess.Popen[bytes]]:
    """The ranks' parent; on leaving, also by Ctrl-C, it and the ranks are gone.

    The ranks inherit the reading end of a pipe as their standard input and end when it does, so that they also end
    when this process is killed.
    """
    environment = rank_environment(spec, directory, os.environ)
    with (directory / "output").open("wb") as output:
        torchrun = subprocess.Popen(
            torchrun_command(spec, directory, rank_module),
            cwd=PACK_ROOT,
            env=environment,
            stdin=subprocess.PIPE,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # Ctrl-C is for the doctor, which then ends the ranks in order
        )
    try:
        yield torchrun
    finally:
        _end(torchrun)


def _end(torchrun: subprocess.Popen[bytes]) -> None:
    """End the ranks at once: they hold nothing that wants an orderly end."""
    if torchrun.poll() is None:
        end_tree(torchrun.pid)
    assert torchrun.stdin is not None
    torchrun.stdin.close()  # the end of ranks that were started a moment ago and were not seen in the tree
    torchrun.wait()
