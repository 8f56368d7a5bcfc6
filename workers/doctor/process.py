"""The doctor in a process of its own, so that ComfyUI's process neither waits for a driver nor touches a GPU for it."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import IO

from parallel_runtime.errors import ConfigurationError, PoolError
from parallel_runtime.requests.control import Cancelled
from parallel_runtime.said import Said, said

from ..launch import PACK_ROOT
from ..processes import end_tree

COMMAND = (sys.executable, "-m", "workers.doctor", "--json", "--end-with-parent")
POLL_SECONDS = 0.1
END_SECONDS = 15.0
FIX = said("Run python -m workers.doctor in {pack_root} to see more.", pack_root=PACK_ROOT)
WORKS, BROKEN, WRONG_ARGUMENTS = 0, 1, 2  # its exit codes


@dataclass(frozen=True)
class Verdict:
    """What the doctor said. `works`: nothing is broken; `text`: the report for people."""

    works: bool
    text: Said


def run_doctor(
    devices: str, should_cancel: Callable[[], bool], command: Sequence[str] = COMMAND, limit_seconds: float = 300.0
) -> Verdict:
    """Run the doctor for `devices` (as in ParallelConfig) and wait for it. Raises Cancelled where `should_cancel` ended
    it and what it had started, ConfigurationError for devices that are not there, PoolError where no report came."""
    deadline = time.monotonic() + limit_seconds  # it bounds each of its parts; this is for a doctor that hangs itself
    with tempfile.TemporaryFile() as output, tempfile.TemporaryFile() as complaint:
        process = subprocess.Popen(
            [*command, "--devices", devices],
            cwd=PACK_ROOT,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=complaint,
            start_new_session=True,  # Ctrl-C in ComfyUI's terminal is for ComfyUI
        )
        try:
            while process.poll() is None:
                if should_cancel():
                    raise Cancelled
                if time.monotonic() > deadline:
                    text = "The doctor came to no end within {limit_seconds} seconds."
                    raise PoolError(text, FIX, limit_seconds=f"{limit_seconds:.0f}")
                time.sleep(POLL_SECONDS)
        finally:
            if process.poll() is None:  # asked to end, it takes its ranks along
                end_tree(process.pid, END_SECONDS)
                with contextlib.suppress(subprocess.TimeoutExpired):  # one inside of a driver ends when that lets go
                    process.wait(POLL_SECONDS)
        code = process.returncode
        if code in (WORKS, BROKEN) and (verdict := _report(output)) is not None:
            return verdict
        last = next((line.strip() for line in reversed(_lines(complaint)) if line.strip()), "nothing")
    if code == WRONG_ARGUMENTS:
        raise ConfigurationError(last, "")
    raise PoolError("The doctor ended with code {code} and no report. It said: {last}", FIX, code=code, last=last)


def _lines(file: IO[bytes]) -> list[str]:
    file.seek(0)
    return file.read().decode(errors="replace").splitlines()


def _report(output: IO[bytes]) -> Verdict | None:
    """Its last line; None where that is none."""
    with contextlib.suppress(IndexError, ValueError, KeyError, TypeError):
        report = json.loads(_lines(output)[-1])
        return Verdict(bool(report["works"]), Said.from_data(report["said"]))
    return None
