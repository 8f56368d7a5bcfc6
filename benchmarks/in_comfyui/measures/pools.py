"""Two pools in one server, each with half of the GPUs, whose prompts alternate."""

from __future__ import annotations

from ..bench import Bench, Found, add, per_step
from ..graphs import Way
from ..runs import MeasurementError


def pools(bench: Bench, found: Found, file: str) -> None:
    """The first prompt of each pool, and two later ones of each: neither may end the other."""
    gpus = bench.many.split(",")
    if len(gpus) < 2:
        raise MeasurementError("two pools want two GPUs")
    half = len(gpus) // 2
    ways = [Way(",".join(part)) for part in (gpus[:half], gpus[half:])]
    model = f"{bench.family(file).described}, two pools in turn"
    found |= {"kind": "start", "model": model, "way": ways[0].title, "gpus": ways[0].gpus}
    for number in range(3):
        for way in ways:
            run = bench.make(way, file)
            add(found, f"{'first' if not number else 'later'} on {way.devices}", run)
            found["rows"][-1]["ms"] = per_step(run)
