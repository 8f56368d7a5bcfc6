"""`python -m workers.doctor`: says what of this machine works for a pool, what does not, and what to do about it.

Exit code 0: everything that is needed works; 1: something is broken; 2: wrong arguments. torch is imported in child
processes only, so that the doctor outlives what is broken.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
from collections.abc import Sequence

from parallel_runtime.config import ParallelConfig
from parallel_runtime.errors import ConfigurationError, PoolError
from parallel_runtime.said import Said

from ..launch import PoolSpec, resolve_devices
from ..processes import die_with_parent
from .link_check import LinkCheck, check_links
from .machine import ask_torch, look
from .report import find, find_in_software, write_report

LINK_SECONDS = 90.0


def examine(devices: str, limit_seconds: float) -> tuple[Said, bool]:
    """The report, and whether nothing is broken."""
    machine = ask_torch(look())
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
    return write_report(str(spec), machine, found, link), all(finding.level != "broken" for finding in found)


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
        text, works = examine(parsed.devices, parsed.limit)
    except ConfigurationError as error:
        print(error, file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    report = json.dumps({"works": works, "text": text, "said": text.to_data()}) + "\n"
    print(report if parsed.json else text, end="")
    return 0 if works else 1


if __name__ == "__main__":
    sys.exit(main())
