"""How many bytes of keys and values a stage will keep, before it keeps any."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from ..mesh.mesh import Layout
from ..requests.facts import ModelFacts
from .runner import Part


def kept_bytes(model: ModelFacts, owned: tuple[int, int], layout: Layout, parts: Sequence[Part]) -> int:
    """Return the bytes of keys and values that this rank keeps over a run: what `StaleKeys` will allocate.

    Args:
        owned: (start, stop) of the stage's blocks.
        parts: of `lay_out`; each keeps keys and values of its own.
    """
    layers = model.attentions[slice(*owned)]
    over_all, over_image = (sum(counts) for counts in zip(*layers, strict=True))
    heads = -(-model.heads // layout.plan.ulysses)  # those that are padded in take memory as well
    tokens = 0
    for part in parts:
        slots = part.slots
        whole, image = (each.lengths()[layout.coordinate["ring"]] for each in (slots, replace(slots, text=0)))
        tokens += len(part.rows) * (over_all * whole + over_image * image)
    return 2 * tokens * heads * (model.width // model.heads) * model.bytes_per_parameter
