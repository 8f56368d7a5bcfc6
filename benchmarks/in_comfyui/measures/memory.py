"""What stays on the GPUs after Unload Models, and what the next prompt pays for it."""

from __future__ import annotations

from ..bench import Bench, Found, per_step
from ..graphs import Way
from ..memory import after_unload, measure, peaks


def unload(bench: Bench, found: Found, file: str, way: Way) -> None:
    """Memory per process before, at most during, after a prompt, and for 3 s after POST /free; then the next prompt."""
    server = bench.server
    found |= {"kind": "memory", "model": bench.family(file).described, "way": way.title, "gpus": way.gpus}
    found["before GiB"] = measure(server, bench.cpu)
    with peaks(server, bench.cpu) as most:
        run = bench.make(way, file)
    found |= {"peak GiB": dict(most), "after prompt GiB": measure(server, bench.cpu), "ms": per_step(run)}
    server.api.free()
    held, seconds = after_unload(server, bench.cpu)
    found |= {"3 s after unload GiB": held, "ranks below 1.5 GiB after s": seconds and round(seconds, 2)}
    again = bench.make(way, file)
    found["first step after unload s"] = round(again.first_step, 2)
    found["prompt after unload s"] = round(again.seconds, 2)
    found["after next prompt GiB"] = measure(server, bench.cpu)
