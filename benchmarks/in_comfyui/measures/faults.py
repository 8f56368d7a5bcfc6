"""What a fault costs: when it is noticed, what the artist reads, and when the next prompt has its first step."""

from __future__ import annotations

import time
from collections.abc import Callable

import psutil

from ..bench import Bench, Found
from ..graphs import Way, plain
from ..process_tree import ranks
from ..runs import MeasurementError, Run
from ..server import Server

_AT_STEP = 3
_STEPS = 40
"""Long enough for the fault to come in the middle."""


def cancel(server: Server) -> None:
    """Press cancel."""
    server.api.interrupt()


def kill_rank(server: Server) -> None:
    """SIGKILL for the last rank."""
    _last_rank(server).kill()


def stop_rank(server: Server) -> None:
    """SIGSTOP for the last rank: it hangs."""
    _last_rank(server).suspend()


def fault(bench: Bench, found: Found, file: str, way: Way, do: Callable[[Server], None], loading: bool = False) -> None:
    """Do it in the middle of a prompt, or while the model is being loaded; then run the next prompt."""
    title = f"{(do.__doc__ or '').strip()}{' While loading.' if loading else ''}"
    found |= {"kind": "fault", "model": bench.family(file).title, "way": way.title, "gpus": way.gpus, "fault": title}
    if loading:
        bench.server.api.free()
        bench.wait(2)
    else:
        bench.make(way, file)
    moments: list[float] = []
    began = time.monotonic()

    def watch(run: Run, reported: int) -> None:
        due = time.monotonic() > began + 1.0 if loading else reported >= _AT_STEP
        if due and not moments:
            moments.append(time.monotonic())
            do(bench.server)

    run = bench.server.run(plain(way, bench.picture(file, steps=_STEPS)), bench.deadline, during=watch)
    if not moments:
        raise MeasurementError("the prompt ended before the fault came")
    found["ended after s"] = round(run.ended - moments[0], 2)
    found["said"] = run.error or ("cancelled" if run.interrupted else "nothing: it succeeded")
    again = bench.make(way, file)
    found |= {"first step of the next s": round(again.first_step, 2), "next prompt s": round(again.seconds, 2)}


def _last_rank(server: Server) -> psutil.Process:
    running = ranks(server.pid)
    if not running:
        raise MeasurementError("no rank is running")
    return max(running, key=lambda process: process.pid)
