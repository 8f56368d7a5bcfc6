"""`python -m workers.doctor`: says what of this machine works for a pool, what does not, and what to do about it.

Exit code 0: everything that is needed works; 1: something is broken; 2: wrong arguments. torch is imported in child
processes only, so that the doctor outlives what is broken; ComfyUI has it in a process of its own (`run_doctor`), so
that it neither waits for a driver nor touches a GPU."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import IO

from parallel_runtime.config import ParallelConfig
from parallel_runtime.errors import ConfigurationError, PoolError
from parallel_runtime.requests.control import Cancelled
from parallel_runtime.said import Said, said

from ..launch import OWN_SESSION, PACK_ROOT, PoolSpec, resolve_devices
from ..leftovers import die_with_parent, end_tree
from .link_check import LinkCheck, check_links
from .machine import look
from .report import find, find_in_software, write_report

LINK_SECONDS = 90.0
COMMAND = (sys.executable, "-m", "workers.doctor", "--json", "--end-with-parent")
POLL_SECONDS = 0.1
END_SECONDS = 15.0
FIX = said("Run python -m workers.doctor in {pack_root} to see more.", pack_root=PACK_ROOT)
WORKS, BROKEN, WRONG_ARGUMENTS = 0, 1, 2  # exit codes


@dataclass(frozen=True)
class Verdict:
    """What the doctor said. `works`: nothing is broken; `text`: the report for people."""

    works: bool
    text: Said


def examine(devices: str, limit_seconds: float) -> Verdict:
    """Look at this machine, and check the links between these devices."""
    machine = look()
    link = None
    try:
        spec = resolve_devices(ParallelConfig(devices=devices), lambda: len(machine.gpus))
    except ConfigurationError:
        if not any(find_in_software(machine)):
            raise
        spec = PoolSpec("cpu", (0,))
    else:
        if machine.packages["torch"] and not machine.problem:
            link = check(spec, limit_seconds)
    found = find(spec, machine, link)
    works = all(finding.level != "broken" for finding in found)
    return Verdict(works, write_report(str(spec), machine, found, link))


def check(spec: PoolSpec, limit_seconds: float) -> LinkCheck:
    """Exchange numbers; on the CPU with two ranks at least, as one has nobody to talk to."""
    if spec.device_type == "cpu" and spec.world_size == 1:
        spec = PoolSpec("cpu", (0, 1))
    try:
        return check_links(spec, limit_seconds)
    except (OSError, PoolError) as error:  # a full disk, no more processes
        return LinkCheck(str(spec), failure=f"The check could not start: {error}")


def parse_arguments(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Read the command line; wrong arguments end the process with code 2."""
    parser = argparse.ArgumentParser("python -m workers.doctor", description="Checks this machine for Parallel DiT.")
    parser.add_argument("--devices", default="auto", help="auto, GPU numbers such as 0,1, or cpu:2 (default: auto)")
    parser.add_argument("--json", action="store_true", help="the report as one JSON object on one line")
    parser.add_argument("--limit", type=float, default=LINK_SECONDS, help="seconds for the check of the links")
    parser.add_argument("--end-with-parent", action="store_true", help="end when the calling thread does")
    return parser.parse_args(arguments)


def main() -> int:
    """Process entry; returns the exit code."""
    # Leave through every `finally`, so that the ranks and the folder go too.
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    parsed = parse_arguments()
    if parsed.end_with_parent:
        die_with_parent(os.getppid())
    try:
        verdict = examine(parsed.devices, parsed.limit)
    except ConfigurationError as error:
        print(error, file=sys.stderr)
        return WRONG_ARGUMENTS
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    report = {"works": verdict.works, "text": verdict.text, "said": verdict.text.to_data()}
    print(json.dumps(report) + "\n" if parsed.json else verdict.text, end="")
    return WORKS if verdict.works else BROKEN


def run_doctor(
    devices: str, should_cancel: Callable[[], bool], command: Sequence[str] = COMMAND, limit_seconds: float = 300.0
) -> Verdict:
    """Run the doctor for `devices` (as in ParallelConfig) and wait for it. Raises Cancelled where `should_cancel` ended
    it and what it had started, ConfigurationError for devices that are not there, PoolError where no report came."""
    deadline = time.monotonic() + limit_seconds  # it bounds each of its parts; this is for a doctor that hangs itself
    with tempfile.TemporaryFile() as output, tempfile.TemporaryFile() as complaint:
        started = [*command, "--devices", devices]
        process = subprocess.Popen(started, stdout=output, stderr=complaint, **OWN_SESSION)
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


if __name__ == "__main__":
    sys.exit(main())
