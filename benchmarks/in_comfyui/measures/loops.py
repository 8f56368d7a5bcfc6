"""What a step takes under each sampler node: loops in the pool, and one that stays in ComfyUI."""

from __future__ import annotations

from collections.abc import Callable

from ..bench import Bench, Found, per_step
from ..graphs import BY_DEFAULT, Graph, Picture, Way, advanced, custom, plain, sampled_by, step_by_step
from ..runs import MeasurementError

_LDM, _LOADER = Way(), Way(BY_DEFAULT)
_SETTLED = 2
"""Prompts after the first; of the last one the steps are told."""
_LONG = 5.0
"""Seconds; of prompts that take longer, one less."""


def _looked(way: Way, picture: Picture) -> Graph:
    return step_by_step(plain(way, picture))


def _by(sampler: str) -> Callable[[Way, Picture], Graph]:
    return lambda way, picture: sampled_by(plain(way, picture), sampler)


_NODES: tuple[tuple[str, Callable[[Way, Picture], Graph], Way, bool], ...] = (
    ("Load Diffusion Model, KSampler", plain, _LDM, False),
    ("Load Diffusion Model, previews", plain, _LDM, True),
    *((f"Load Diffusion Model, {name}", _by(name), _LDM, False) for name in ("er_sde", "res_multistep")),
    ("KSampler", plain, _LOADER, False),
    ("KSampler Advanced", advanced, _LOADER, False),
    ("SamplerCustomAdvanced", custom, _LOADER, False),
    ("Parallel Sampler", plain, Way(BY_DEFAULT, "ParallelSampler"), False),
    *((f"KSampler, {name}", _by(name), _LOADER, False) for name in ("er_sde", "res_multistep")),
    ("KSampler, previews", plain, _LOADER, True),
    ("Parallel Sampler, previews", plain, Way(BY_DEFAULT, "ParallelSampler"), True),
    ("KSampler, step by step", _looked, _LOADER, False),
    ("KSampler, again", plain, _LOADER, False),
)


def loops(bench: Bench, found: Found, file: str) -> None:
    """Milliseconds a step, and seconds from the queue to the first step of a later prompt."""
    found |= {"kind": "loops", "model": bench.family(file).described}
    rows = found.setdefault("rows", [])
    for name, graph, way, previews in _NODES:
        try:
            for number in range(1 + _SETTLED):
                run = bench.run(graph(way, bench.picture(file)), previews)
                if number and run.seconds > _LONG:
                    break
        except MeasurementError as error:
            rows.append({"node": name, "error": str(error)})
            continue
        row = {"node": name, "ms": per_step(run), "first step s": round(run.first_step, 3)}
        rows.append(row | {"all s": round(run.seconds, 2)})
