"""LoRA on all layers: what it costs to add one, to change its strength, to stack another, to take them away."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from ..bench import COMPARED_SEED, Bench, Found, add, per_step
from ..families import ENDING
from ..graphs import Way, plain, with_loras
from ..lora_files import RANK, write_lora

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
    found |= {"kind": "start", "model": title, "way": way.title, "gpus": way.gpus}
    for what, loras in TURNS:
        compared = what in ("the same", "taken away again")
        picture = replace(bench.picture(file, seed=COMPARED_SEED if compared else None), steps=_STEPS)
        run = bench.run(
            with_loras(plain(way, picture), [(f"{file} {name}{ENDING}", strength) for name, strength in loras])
        )
        add(found, what, run)
        row = found["rows"][-1]
        row |= {"beyond a step ms": round(1000 * run.first_step - per_step(run), 1), "step ms": per_step(run)}
        if compared:
            row["distance"] = bench.distance(f"{file} {what}", way, run)
