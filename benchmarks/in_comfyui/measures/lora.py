"""LoRA on all layers: what it costs to add one, to change its strength, to stack another, to take them away."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from ..bench import COMPARED_SEED, Bench, Found, per_step
from ..families import ENDING
from ..graphs import Graph, Way, link, node, plain
from ..lora_files import RANK, write_lora
from .start import add

Lora = tuple[str, float]
"""File and strength."""
_STEPS = 5
"""The first is what is asked for; the others tell what a usual one takes."""
_FIRST, _SECOND = "all layers", "all layers 2"
TURNS: Sequence[tuple[str, Sequence[Lora]]] = (
    ("no LoRA, first", ()),
    ("no LoRA", ()),
    ("added", ((_FIRST, 0.8),)),
    ("the same", ((_FIRST, 0.8),)),
    ("other strength", ((_FIRST, 0.5),)),
    ("strength as before", ((_FIRST, 0.8),)),
    ("a second one stacked", ((_FIRST, 0.8), (_SECOND, -0.4))),
    ("the second one taken away", ((_FIRST, 0.8),)),
    ("both taken away", ()),
    ("added again", ((_FIRST, 0.8),)),
    ("taken away again", ()),
)


def lora(bench: Bench, found: Found, file: str, way: Way) -> None:
    """Prompts with other sets of LoRA in turn: what a first step takes beyond a usual one."""
    folder = bench.server.base / "models"
    model = folder / "diffusion_models" / f"{file}{ENDING}"
    sizes = [write_lora(model, folder / "loras" / f"{file} {name}{ENDING}", seed=seed)
             for seed, name in enumerate((_FIRST, _SECOND))]  # fmt: skip
    title = f"{bench.family(file).described}, rank {RANK} on {sizes[0]} layers"
    ways = f"{way.title}, network {way.network}" if way.network else way.title
    found |= {"kind": "start", "model": title, "way": ways, "gpus": way.gpus}
    for what, loras in TURNS:
        compared = what in ("the same", "taken away again")
        picture = replace(bench.picture(file, seed=COMPARED_SEED if compared else None), steps=_STEPS)
        run = bench.run(_with(plain(way, picture), file, loras))
        add(found, what, run)
        row = found["rows"][-1]
        row |= {"beyond a step ms": round(1000 * run.first_step - per_step(run), 1), "step ms": per_step(run)}
        if compared:
            row["distance"] = bench.distance(f"{file} {what}", way, run)


def _with(graph: Graph, file: str, loras: Sequence[Lora]) -> Graph:
    """The graph with LoRA after its loader."""
    last = "model"
    changed = dict(graph)
    for number, (name, strength) in enumerate(loras):
        inputs = {"lora_name": f"{file} {name}{ENDING}", "strength_model": strength}
        changed[f"lora {number}"] = node("LoraLoaderModelOnly", model=link(last), **inputs)
        last = f"lora {number}"
    if last != "model":
        sampler = changed["sampler"]
        changed["sampler"] = {**sampler, "inputs": {**sampler["inputs"], "model": link(last)}}
    return changed
