"""`python -m workers.doctor`: says what of this machine works for a pool, what does not, and what to do about it.

Run from the pack's folder, with ComfyUI's Python. Exit code 0: everything that is needed works; 1: something is
broken; 2: wrong arguments. torch is imported in child processes only, so that the doctor outlives what is broken.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from types import FrameType

from parallel_runtime.config import ParallelConfig
from parallel_runtime.errors import ConfigurationError, PoolError
from parallel_runtime.said import Said

from ..launch import PoolSpec, resolve_devices
from ..link_result import LinkCheck
from ..machine_facts import GpuId, recall, remember_facts
from .diagnosis import DoctorReport, can_check_links, facts_of, find_in_software, report
from .machine import Machine, first_look, read_machine
from .report_text import render_first_look, render_text

FACTS_SECONDS = 120.0
LINK_SECONDS = 90.0


def examine(
    devices: str, machine: Machine, limit_seconds: float, on_part: Callable[[Said], None] = lambda text: None
) -> DoctorReport:
    """Check the links of a pool on `devices` and judge everything.

    Args:
        on_part: gets the report without the check of the links, before that begins.

    Raises:
        ConfigurationError: devices that this machine does not have, and nothing is broken that would explain it.
    """
    try:
        spec = resolve_devices(ParallelConfig(devices=devices), lambda: len(machine.gpus))
    except ConfigurationError:
        if not any(find_in_software(machine)):
            raise
        return report(PoolSpec("cpu", (0,)), machine, None)
    on_part(render_text(replace(report(spec, machine, None), checking=True)))
    link = check(spec, limit_seconds) if can_check_links(machine) else None
    facts = facts_of(spec, machine, link, recall)
    if link is not None and facts.link.measured:
        gpus = tuple(GpuId(machine.gpus[index].name, machine.gpus[index].uuid) for index in spec.devices)
        remember_facts(spec, gpus, facts)
    return report(spec, machine, link)


def check(spec: PoolSpec, limit_seconds: float) -> LinkCheck:
    """Run the collectives; on the CPU with two ranks at least, as one has nobody to talk to."""
    from .link_launch import check_links  # needs psutil

    if spec.device_type == "cpu" and spec.world_size == 1:
        spec = PoolSpec("cpu", (0, 1))
    try:
        return check_links(spec, limit_seconds)
    except (OSError, PoolError) as error:  # a full disk, no more processes
        return LinkCheck(str(spec), failure=f"The check could not start: {error}")


def render_json(found: DoctorReport) -> str:
    """The report as one JSON object: `text` is what people read, `said` what that is made of, `works` the verdict."""
    text = render_text(found)
    facts = {"works": found.works, "text": text, "said": text.to_data(), **asdict(found)}
    return json.dumps(facts, ensure_ascii=False)


def parse_arguments(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Read the command line; wrong arguments end the process with code 2."""
    parser = argparse.ArgumentParser("python -m workers.doctor", description="Checks this machine for Parallel DiT.")
    parser.add_argument("--devices", default="auto", help="auto, GPU numbers such as 0,1, or cpu:2 (default: auto)")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of text")
    parser.add_argument(
        "--limit",
        type=float,
        default=LINK_SECONDS,
        metavar="SECONDS",
        help=f"time for the check of the links (default: {LINK_SECONDS:.0f})",
    )
    parser.add_argument("--parts", type=Path, metavar="FILE", help="write there what is known so far, as it comes")
    parser.add_argument("--end-with-parent", action="store_true", help="end when the calling thread does")
    parsed = parser.parse_args(arguments)
    try:
        ParallelConfig(devices=parsed.devices)
    except ConfigurationError as error:
        parser.error(str(error))
    if not 1 <= parsed.limit <= 3600:
        parser.error(f"--limit {parsed.limit:g} is not between 1 and 3600 seconds.")
    return parsed


def main() -> int:
    """Process entry; returns the exit code."""
    signal.signal(signal.SIGTERM, _stop)
    parsed = parse_arguments()
    if parsed.end_with_parent:
        with contextlib.suppress(ImportError):  # psutil is missing, which the report says
            from ..processes import die_with_parent

            die_with_parent(os.getppid())

    def tell_part(text: Said) -> None:
        if parsed.parts is not None:
            unfinished = parsed.parts.with_suffix(".new")
            unfinished.write_text(json.dumps(text.to_data()), encoding="utf-8")
            unfinished.rename(parsed.parts)

    try:
        tell_part(render_first_look(*first_look()))
        _tell("Reading versions, GPUs and memory ...")
        machine = read_machine(FACTS_SECONDS)
        _tell(f"Checking the links, {parsed.limit:.0f} seconds at most ...")
        found = examine(parsed.devices, machine, parsed.limit, tell_part)
    except ConfigurationError as error:
        print(error, file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    print(render_json(found) if parsed.json else render_text(found), end="")
    return 0 if found.works else 1


def _stop(number: int, frame: FrameType | None) -> None:
    """Leave through every `finally`, so that the ranks and the folder go too."""
    sys.exit(128 + number)


def _tell(text: str) -> None:
    if sys.stderr.isatty():
        print(text, file=sys.stderr)
