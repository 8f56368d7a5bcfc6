"""What is known of a ComfyUI network before it has weights, and what the engine asks of it before it runs a request."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from operator import attrgetter
from typing import Any

import torch
from torch import nn

from ...errors import RequestError
from ...requests.conditioning import Conditioning
from ...requests.facts import ModelFacts, RequestFacts, Seen
from ...said import said
from ..cut_blocks import unknown_blocks
from ..stages import has_stages
from ..tables.blocks import LATENT_SHAPES, Network
from ..tables.comfyui import find_network


@dataclass(frozen=True)
class HostFamily:
    """A network as its file describes it; see `Family` in the engine.

    Args:
        name: for the client.
        title: how artists call it.
        patch: latent positions that a token takes, by the last dims of the latent.
        rows_together: every rank computes all rows of a batch, so that there is one to plan for.
    """

    name: str
    title: str
    patch: tuple[int, ...]
    rows_together: bool

    @property
    def token(self) -> int:
        """Latent positions along one side of a token."""
        return self.patch[-1]

    def check(self, conditioning: Conditioning, x: torch.Tensor) -> Seen:
        """The network checks its arguments itself, as in ComfyUI: what is seen here is the batch alone.

        Raises:
            RequestError: a text of another batch.
        """
        context = conditioning.arguments.get("context")
        shapes = conditioning.arguments.get(LATENT_SHAPES)
        latents = (tuple(x.shape),) if shapes is None else tuple(tuple(shape) for shape in shapes)
        if not isinstance(context, torch.Tensor) or context.ndim < 2:
            return Seen((x.shape[0], 0, 0), latents)
        if context.shape[0] not in (1, x.shape[0]):
            raise RequestError(
                said(
                    "The conditioning holds {shape} items, but the latent batch holds {shape2}.",
                    shape=context.shape[0],
                    shape2=x.shape[0],
                ),
                "Use one prompt, or as many as latents.",
            )
        return Seen((context.shape[0], context.shape[1], context.shape[-1]), latents)

    def describe(self, seen: Seen, *, batch: int, steps: int = 0) -> RequestFacts:
        """A request's facts. A latent beside the video is sound, which has at least a token for each moment."""
        first, *others = (shape[2:] for shape in seen.latents)
        patch = (1,) * max(0, len(first) - len(self.patch)) + self.patch[-len(first) :] if first else ()
        tokens = math.prod(-(-size // by) for size, by in zip(first, patch, strict=True))
        tokens += sum(sizes[0] for sizes in others if sizes)
        batch = 1 if self.rows_together else batch
        rows = math.prod(-(-size // by) for size, by in zip(first[:-1], patch[:-1], strict=True))
        request = RequestFacts(tokens, seen.text[1], batch, rows, in_pool=steps > 0)
        return replace(request, steps=steps) if steps else request


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
    image, text, shared = _met(network, data) if data is not None else (sum(blocks), sum(blocks), 0)
    facts = ModelFacts(
        title=title,
        heads=heads,
        width=width,
        parameters=total,
        block_sizes=blocks,
        attentions=(1,) * len(blocks),
        image_parameters=image,
        text_parameters=text,
        shared_parameters=shared,
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


def _met(network: nn.Module, data: Network) -> tuple[int, int, int]:
    """Parameters of all blocks that a token of the picture meets, that one of the text does, and that one row does.

    Streams beside one another have weights of their own, in equal parts. What modulates meets one row per picture. Of
    a cross attention the keys and values, half of it, meet a text that is no stream.
    """
    image = text = shared = 0
    for blocks in data.blocks:
        modulations = {name for names in blocks.modulations.values() for name in names}
        for block in network.get_submodule(blocks.path).children():
            modulates = sum(_size(block, name) for name in modulations)
            aside = sum(_size(block, name) for name in blocks.cross) // 2
            own = (_size(block) - modulates - aside) // len(blocks.tokens)
            image += own
            text += aside or own
            shared += modulates
    return image, text, shared


def _size(block: nn.Module, path: str = "") -> int:
    """Parameters of a submodule; 0 where this block has it not."""
    found: Any = block
    for name in path.split(".") if path else ():
        found = getattr(found, name, None)
    return sum(parameter.numel() for parameter in found.parameters()) if isinstance(found, nn.Module) else 0


def _width(network: nn.Module, data: Network | None) -> int:
    """Of a token in the blocks: what most of a block's products take in; the others take in more, mostly."""
    if data is not None and data.width:
        return int(attrgetter(data.width)(network))
    root = network if data is None else next(iter(network.get_submodule(data.blocks[-1].path).children()))
    widths = [parameter.shape[1] for parameter in root.parameters() if parameter.ndim == 2]
    return max(set(widths), key=lambda width: (widths.count(width), -width)) if widths else 1
