"""The doctor in a process of its own, so that ComfyUI's process neither waits for a driver nor touches a GPU for it."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from parallel_runtime.errors import ConfigurationError, PoolError
from parallel_runtime.requests.control import Cancelled
from parallel_runtime.said import Said, said
from workers.processes import end_tree

PACK_ROOT = Path(__file__).resolve().parent.parent
COMMAND = (sys.executable, "-m", "workers.doctor", "--json", "--end-with-parent")
LIMIT_SECONDS = 300.0  # the doctor bounds each of its parts; this is for a doctor that hangs itself
POLL_SECONDS = 0.1
END_SECONDS = 15.0
WRONG_ARGUMENTS = 2


@dataclass(frozen=True)
class Verdict:
    """What the doctor said. `works`: nothing is broken; `text`: the report for people."""

    works: bool
    text: Said


def run_doctor(
    devices: str,
    should_cancel: Callable[[], bool],
    command: Sequence[str] = COMMAND,
    limit_seconds: float = LIMIT_SECONDS,
    on_part: Callable[[Said], None] | None = None,
) -> Verdict:
    """Run the doctor for `devices` (as in ParallelConfig) and wait for it.

    Args:
        on_part: gets the report so far, each time that there is more of it.

    Raises:
        Cancelled: `should_cancel` said so; the doctor and what it had started are gone.
        ConfigurationError: devices that are not there.
        PoolError: it came to no report.
    """
    with tempfile.TemporaryDirectory(prefix="parallel-dit-doctor-") as folder:
        parts = Path(folder) / "parts" if on_part is not None else None
        return _run(devices, should_cancel, command, limit_seconds, parts, on_part or (lambda text: None))


def _run(
    devices: str,
    should_cancel: Callable[[], bool],
    command: Sequence[str],
    limit_seconds: float,
    parts: Path | None,
    on_part: Callable[[Said], None],
) -> Verdict:
    polls = int(limit_seconds / POLL_SECONDS)
    told = ""
    process = subprocess.Popen(
        [*command, "--devices", devices, *(["--parts", str(parts)] if parts is not None else [])],
        cwd=PACK_ROOT,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,  # Ctrl-C in ComfyUI's terminal is for ComfyUI
    )
    try:
        for _ in range(polls):
            try:
                output, complaint = process.communicate(timeout=POLL_SECONDS)
            except subprocess.TimeoutExpired:
                if should_cancel():
                    raise Cancelled from None
                if parts is not None and parts.exists() and (part := parts.read_text(encoding="utf-8")) != told:
                    told = part
                    on_part(Said.from_data(json.loads(part)))
            else:
                return _read(output, complaint, process.returncode)
        raise PoolError(
            said("The doctor came to no end within {limit_seconds} seconds.", limit_seconds=f"{limit_seconds:.0f}"),
            said("Run python -m workers.doctor in {pack_root} and see where it waits.", pack_root=PACK_ROOT),
        )
    finally:
        _end(process)


def _read(output: str, complaint: str, code: int) -> Verdict:
    try:
        report = json.loads(output)
        return Verdict(report["works"], Said.from_data(report["said"]))
    except (ValueError, KeyError, TypeError):
        last = next((line for line in reversed(complaint.splitlines()) if line.strip()), "nothing").strip()
        if code == WRONG_ARGUMENTS:
            raise ConfigurationError(last, "") from None
        raise PoolError(
            said("The doctor ended with code {code} and no report. It said: {last}", code=code, last=last),
            said("Run python -m workers.doctor in {pack_root} to see more.", pack_root=PACK_ROOT),
        ) from None


def _end(process: subprocess.Popen[str]) -> None:
    """Ask it and its ranks to end, and it takes its folder along; kill what does not."""
    if process.poll() is None:
        end_tree(process.pid, END_SECONDS)
        process.communicate()
