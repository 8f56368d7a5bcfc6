"""What is known of a ComfyUI network before it has weights."""

from __future__ import annotations

from dataclasses import dataclass
from operator import attrgetter

import torch
from torch import nn

from ...requests.facts import ModelFacts
from ..cut_blocks import unknown_blocks
from ..facts import describe
from ..tables.blocks import Network
from ..tables.comfyui import find_network


def patch_of(network: torch.nn.Module, dims: int) -> tuple[int, ...]:
    """Latent positions that a token takes along each of the last `dims` dims, by what the network says."""
    said = getattr(network, "patch_size", None)
    if isinstance(said, int):
        return (1,) * (dims - 2) + (said,) * min(2, dims)
    if isinstance(said, (list, tuple)) and said and all(isinstance(each, int) for each in said):
        return (*((1,) * (dims - len(said))), *said[-dims:])
    return (1,) * dims


@dataclass(frozen=True)
class Described:
    """What is known of it.

    Args:
        data: how ranks share out its tokens; None where they share out the batch alone.
        why_whole: why they do that, a sentence; "" where they share out tokens.
        head_dim: of its attention.
        patch: latent positions that a token takes, by the last dims of the latent.
        rows_together: see the data.
    """

    facts: ModelFacts
    data: Network | None
    why_whole: str
    head_dim: int
    patch: tuple[int, ...]
    rows_together: bool


def describe_network(network: nn.Module, size: int, latent_dimensions: int) -> Described:
    """The facts that plans are made from.

    Args:
        network: on the meta device.
        size: bytes of its weights.
        latent_dimensions: dims of its latents that are space or time.
    """
    known, why = find_network(type(network)), ""
    title = known.title if known is not None else type(network).__name__
    if known is None:
        why = f"The tokens of {title} are not shared out yet."
    elif known.whole:
        why = f"{title} {known.whole}."
    elif unlike := unknown_blocks(network, known.blocks):
        why = f"The tokens of {title} are not shared out: this ComfyUI has another version of it, {unlike}."
    data = None if why else known
    patch = patch_of(network, latent_dimensions)
    total = max(1, sum(parameter.numel() for parameter in network.parameters()))
    facts = describe(network, data, title, max(1, round(size / total)), patch)
    together = known is not None and known.rows_together
    of_head = data.head_dim if data is not None else ""
    head_dim = int(attrgetter(of_head)(network)) if of_head else facts.width // facts.heads
    return Described(facts, data, why, head_dim, patch, together)
