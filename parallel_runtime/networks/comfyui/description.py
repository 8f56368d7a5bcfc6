"""What is known of a ComfyUI network before it has weights: facts for plans, and whether its tokens are shared out."""

from __future__ import annotations

from dataclasses import dataclass
from operator import attrgetter

from torch import nn

from ...requests.facts import ModelFacts
from .blocks import Network
from .cut_blocks import unknown_blocks
from .host_family import patch_of
from .networks import find_network
from .stage_blocks import has_stages


@dataclass(frozen=True)
class Described:
    """What is known of a network before its weights are read.

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
    kind = type(network)
    known = find_network(kind)
    title = known.title if known is not None else kind.__name__
    why = f"The tokens of {title} are not shared out yet."
    if known is not None and known.whole:
        why = f"{title} {known.whole}."
    elif known is not None and known.blocks:
        unlike = unknown_blocks(network, known.blocks)
        why = f"The tokens of {title} are not shared out: this ComfyUI has another version of it, {unlike}."
        if not unlike:
            why = ""
    data = known if known is not None and not why else None
    patch = patch_of(network, latent_dimensions)
    blocks = _block_sizes(network, data)
    total = sum(parameter.numel() for parameter in network.parameters())
    heads = int(attrgetter(data.heads)(network)) if data is not None else 1
    width = _width(network, data)
    matrices = sum(blocks)
    facts = ModelFacts(
        title=title,
        heads=heads,
        width=width,
        parameters=total,
        block_sizes=blocks,
        attentions=(1,) * len(blocks),
        image_parameters=matrices,
        text_parameters=matrices,
        bytes_per_parameter=max(1, round(size / max(1, total))),
        splits_sequence=data is not None,
        has_stages=data is not None and has_stages(network, data, patch),
    )
    together = known is not None and known.rows_together
    head_dim = int(attrgetter(data.head_dim)(network)) if data is not None and data.head_dim else width // heads
    return Described(facts, data, why, head_dim, patch, together)


def _block_sizes(network: nn.Module, data: Network | None) -> tuple[int, ...]:
    lists = [network.get_submodule(blocks.path) for blocks in data.blocks] if data is not None else []
    found = [block for blocks in lists for block in blocks.children()]
    sizes = tuple(sum(parameter.numel() for parameter in block.parameters()) for block in found)
    return sizes or (sum(parameter.numel() for parameter in network.parameters()),)


def _width(network: nn.Module, data: Network | None) -> int:
    """Of a token in the blocks: what most of a block's products take in; the others take in more, mostly."""
    if data is not None and data.width:
        return int(attrgetter(data.width)(network))
    root = network if data is None else next(iter(network.get_submodule(data.blocks[-1].path).children()))
    widths = [parameter.shape[1] for parameter in root.parameters() if parameter.ndim == 2]
    return max(set(widths), key=lambda width: (widths.count(width), -width)) if widths else 1
