"""What a request is refused for before anything is run: its tensors' shapes, and memory that is not there."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from .. import memory
from ..config import STREAMED
from ..errors import RequestError
from ..mesh.mesh import Layout
from ..planning.cost import kept_bytes
from ..requests.facts import GIB, RequestFacts
from ..requests.patches import CARRIED
from ..requests.requests import ConditioningRef
from ..said import said, together
from .rank_state import Placed, RankState
from .resident import Resident

_CERTAIN_ACTIVATIONS = 6
"""Activations of a token that are alive at once whatever is fused: a block's input, its norm, queries, keys, values
and what attention makes of them. FLUX.1 on H200s was measured to need 9.6 at 2048 × 2048 and 12 at 1024 × 1024."""

_LIKELY = 2
"""Times that much is made free where it only costs that other models leave the device."""
_UNKNOWN = 4 * GIB
"""Made free for activations that are not estimated."""


def check_place(
    state: RankState,
    placed: Placed,
    references: Sequence[ConditioningRef],
    facts: RequestFacts,
    meta: Mapping[str, torch.Tensor],
    keeps: bool,
) -> None:
    """Refuse what this rank cannot run at its place: see `_require_memory`, and inputs that act inside of stages.

    Args:
        references: the conditionings of the request.
        keeps: PipeFusion's stages keep keys and values for it.
    """
    place, resident, kept = placed.place, placed.resident, 0
    if place is None:
        return
    if place.plan.pipe > 1:
        branches = [state.conditionings.peek(reference, meta) for reference in references]
        if any(branch.arguments.get("transformer_options", {}).get(CARRIED) for branch in branches):
            raise RequestError("A node's function acts inside of the network, which stages cannot.", "Set stages to 1.")
        if keeps:
            rows = -(-facts.batch // place.plan.batch)
            kept = kept_bytes(resident.facts, resident.owned(place), rows * (facts.tokens + facts.text_tokens))
    _require_memory(resident, place, facts, meta["x"].shape[0], kept, state.device, state.rank)


def _require_memory(
    resident: Resident, layout: Layout, request: RequestFacts, items: int, kept: int, device: torch.device, rank: int
) -> None:
    """Refuse a request whose keys, values and least activations are more than is free. May refuse on one rank alone.
    Other models leave the device before, where it may need their memory.

    What is estimated to be short but might do is not refused: `explain` warns of it.

    Args:
        items: of the latent, without CFG branches: forwards are of no fewer, where the rank has them.
        kept: bytes of keys and values that PipeFusion will keep.

    Raises:
        OutOfMemoryError: with the sizes and what to change.
    """
    if not resident.facts.splits_sequence:
        resident.prepare_run(_UNKNOWN)
        return  # a U-Net: tokens and width differ from level to level
    tokens = request.tokens + request.text_tokens
    share = layout.speeds[layout.sequence_index] / sum(layout.speeds) if layout.speeds else 1 / layout.plan.sequence
    rows = min(items, request.batch // layout.plan.batch)
    width = resident.facts.width * resident.facts.bytes_per_number
    activations = int(_CERTAIN_ACTIVATIONS * rows * tokens * share * width)
    resident.prepare_run(kept + _LIKELY * activations)
    template = "A batch of {batch} × {tokens} tokens" if request.batch > 1 else "A picture of {tokens} tokens"
    what = said(template, batch=request.batch, tokens=tokens)
    parts = [said("activations of at least {size} GiB", size=f"{activations / GIB:.1f}")]
    if kept:
        parts.insert(0, said("PipeFusion's keys and values of {size} GiB", size=f"{kept / GIB:.1f}"))
    way = "Use a smaller picture or batch, set ulysses to more GPUs, or free memory on that device."
    if kept:
        way = "Use a smaller picture or batch, set ulysses or stages to more GPUs, or free memory on that device."
    ways = [said(way)]
    if layout.plan.pipe == 1 and resident.wish.config.weights not in STREAMED and resident.facts.blocks > 1:
        ways.append(said("Set weights in Parallel Config to spread or host: then the weights take less of it."))
    what = said("{what}, with {parts},", what=what, parts=together(parts, " and "))
    # The reserve was held back when the weights were loaded.
    memory.require(kept + activations, device, rank, what, ways, given_back=resident.kept_bytes(), reserve=0)
