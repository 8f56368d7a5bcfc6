"""What a step takes under each sampler node: loops in the pool, and one that stays in ComfyUI."""

from __future__ import annotations

from collections.abc import Callable

from ..bench import Bench, Found, per_step
from ..graphs import BY_DEFAULT, Graph, Picture, Way, custom, plain, step_by_step

_LOADER = Way(BY_DEFAULT)
_SETTLED = 2
"""Prompts after the first; of the last one the steps are told."""


def _looked(way: Way, picture: Picture) -> Graph:
    return step_by_step(plain(way, picture))


_NODES: tuple[tuple[str, Callable[[Way, Picture], Graph], Way], ...] = (
    ("Load Diffusion Model, KSampler", plain, Way()),
    ("KSampler", plain, _LOADER),
    ("SamplerCustomAdvanced", custom, _LOADER),
    ("Parallel Sampler", plain, Way(BY_DEFAULT, "ParallelSampler")),
    ("KSampler, step by step", _looked, _LOADER),
    ("KSampler, again", plain, _LOADER),
)


def loops(bench: Bench, found: Found, file: str) -> None:
    """Milliseconds a step, and seconds from the queue to the first step of a later prompt."""
    found |= {"kind": "loops", "model": bench.family(file).described}
    rows = found.setdefault("rows", [])
    for name, graph, way in _NODES:
        if name.startswith("SamplerCustom") and bench.family(file).cfg != 1.0:
            continue  # its graph has no second prompt
        for _ in range(1 + _SETTLED):
            run = bench.run(graph(way, bench.picture(file)))
        row = {"node": name, "ms": per_step(run), "first step s": round(run.first_step, 3)}
        rows.append(row | {"all s": round(run.seconds, 2)})
