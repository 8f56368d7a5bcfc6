"""How far each step away from Load Diffusion Model moves the latent, beside what ComfyUI's own options move it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from ..bench import COMPARED_SEED, Bench, Found
from ..graphs import Graph, Way, anew, compiled_by_comfyui, plain
from ..runs import MeasurementError

_NATIVE = Way()
_AS_IT_IS = Way("", attention="ComfyUI", compile="off")


@dataclass(frozen=True)
class Change:
    """One way to the same picture.

    Args:
        way: loader and options; its devices are filled in.
        ranks: 1, or 0: all devices; None: ComfyUI's own loader.
        changed: of the graph.
        options: of ComfyUI's command line, for which it is started anew.
        batch: pictures that are made at once, of which the first is compared.
    """

    what: str
    way: Way = _NATIVE
    ranks: int | None = None
    changed: Callable[[Graph], Graph] = lambda graph: graph
    options: tuple[str, ...] = ()
    batch: int = 1


CHANGES = (
    Change("Load Diffusion Model, a third time", changed=partial(anew, number=2)),
    Change("ComfyUI's network and attention, compile off", _AS_IT_IS, 1),
    Change("the same in Parallel Sampler", replace(_AS_IT_IS, sampler="ParallelSampler"), 1),
    Change("the fastest exact kernel", replace(_AS_IT_IS, attention="auto"), 1),
    Change("that, compiled", replace(_AS_IT_IS, attention="auto", compile="auto"), 1),
    Change("that, on all devices", replace(_AS_IT_IS, attention="auto", compile="auto"), 0),
    Change("as it comes", Way(compile="auto"), 1),
    Change("ComfyUI: weights in float8", Way(weight_dtype="fp8_e4m3fn")),
    Change("ComfyUI: the first of a batch of two", batch=2),
    Change("ComfyUI: --use-split-cross-attention", options=("--use-split-cross-attention",)),
    Change("ComfyUI: --use-quad-cross-attention", options=("--use-quad-cross-attention",)),
    Change("ComfyUI: TorchCompileModel", changed=compiled_by_comfyui),
)


def distances(bench: Bench, found: Found, file: str) -> None:
    """Latents of one picture by each way, relative to the norm of Load Diffusion Model's second one.

    A way that fails is a row.
    """
    found |= {"kind": "distance", "model": bench.family(file).described}
    rows = found.setdefault("rows", [])
    first = _latent(bench, file, Change("")).clone()
    # ComfyUI's first prompt behind a load has other bits than all that follow: its weights still come in.
    wanted = _latent(bench, file, Change("", changed=anew)).clone()
    rows.append(_row("Load Diffusion Model, its first prompt", first, wanted))
    for change in CHANGES:
        if change.ranks == 0 and bench.one == bench.many:
            continue
        row: dict[str, Any] = {"what": change.what}
        rows.append(row)
        try:
            latent = _latent(bench, file, change)
        except MeasurementError as error:
            row["error"] = str(error)[:200]
            if not bench.server.settle(15):
                raise
        else:
            row |= _row(change.what, latent, wanted)
    bench.server.stop()


def _row(what: str, latent: torch.Tensor, wanted: torch.Tensor) -> dict[str, Any]:
    distance = float((latent - wanted).norm() / wanted.norm())
    return {"what": what, "distance": distance, "bits": torch.equal(latent, wanted)}


def _latent(bench: Bench, file: str, change: Change) -> torch.Tensor:
    """(1, ...) float64."""
    bench.server.keep_options(change.options)
    way = change.way
    if change.ranks is not None:
        way = replace(way, devices=bench.many if change.ranks == 0 else bench.one)
    if bench.cpu and way.devices:
        way = replace(way, compile="off")
    picture = replace(bench.picture(file, seed=COMPARED_SEED), batch=change.batch)
    graph = change.changed(plain(way, picture))
    graph["save"]["inputs"]["filename_prefix"] += f"-{CHANGES.index(change) if change in CHANGES else 'first'}"
    run = bench.run(graph)
    assert isinstance(run.saved, Path)
    latent: torch.Tensor = load_file(run.saved)["latent_tensor"].double()
    return latent[:1]
