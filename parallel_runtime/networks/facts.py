"""What plans are made from: facts of a network without weights and its table entry, of ComfyUI's with all that is known
of it then, and of a request by its shapes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from operator import attrgetter

from torch import nn

from ..requests.facts import ModelFacts, RequestFacts
from ..said import said
from .cut_blocks import unknown_blocks
from .stages import has_stages
from .tables.blocks import Blocks, Network, find
from .tables.comfyui import find_network
from .tables.image import CONVOLVES


def describe(
    network: nn.Module, data: Network | None, title: str, number_bytes: int, patch: Sequence[int], why: str = CONVOLVES
) -> ModelFacts:
    """Facts of a network on the meta device, whose weights have so many bytes each, on average.

    Args:
        data: how ranks share out its tokens; None where they share out the batch alone, and `why`.
        patch: latent positions that a token takes, by the last dims of the latent.
    """
    lists = data.blocks if data is not None else ()
    found = [(block, blocks) for blocks in lists for block in network.get_submodule(blocks.path).children()]
    total = _size(network)
    image, text, shared = _met(found) if found else (total, total, 0)
    return ModelFacts(
        title=title,
        heads=int(attrgetter(data.heads)(network)) if data else 1,
        width=_width(network, data),
        parameters=total,
        block_sizes=tuple(_size(block) for block, _ in found) or (total,),
        attentions=tuple(2 if blocks.again and _size(block, blocks.again) else 1 for block, blocks in found) or (1,),
        image_parameters=image,
        text_parameters=text,
        bytes_per_parameter=number_bytes,
        has_stages=data is not None and has_stages(network, data, patch),
        why_whole="" if data is not None else why,
        shared_parameters=shared,
        parallel_blocks=sum(blocks.parallel for _, blocks in found),
    )


def patch_of(network: nn.Module, dims: int) -> tuple[int, ...]:
    """Latent positions that a token takes along each of the last `dims` dims, by what the network says."""
    said = getattr(network, "patch_size", None)
    if isinstance(said, int):
        return (1,) * (dims - 2) + (said,) * min(2, dims)
    if isinstance(said, (list, tuple)) and said and all(isinstance(each, int) for each in said):
        return (*((1,) * (dims - len(said))), *said[-dims:])
    return (1,) * dims


@dataclass(frozen=True)
class Described:
    """What is known of a network of ComfyUI's: its facts; `data` and `patch` as of `describe`; the width of a head;
    `rows_together` and `side_by_side` of its table entry."""

    facts: ModelFacts
    data: Network | None
    head_dim: int
    patch: tuple[int, ...]
    rows_together: bool
    side_by_side: bool


def describe_network(network: nn.Module, size: int, latent_dimensions: int) -> Described:
    """Of a network on the meta device, whose weights have `size` bytes, and whose latents so many dims that are space
    or time."""
    known = find_network(type(network))
    title = known.title if known is not None else type(network).__name__
    if known is None:
        why: str = said("this pack does not know it yet")
    elif not (why := known.whole) and (unlike := unknown_blocks(network, known.blocks)):
        why = said("this ComfyUI has another version of it, {unlike}", unlike=unlike)
    data = None if why else known
    patch = patch_of(network, latent_dimensions)
    total = max(1, sum(parameter.numel() for parameter in network.parameters()))
    facts = describe(network, data, title, max(1, round(size / total)), patch, why)
    together, side_by_side = (known.rows_together, known.side_by_side) if known is not None else (False, False)
    of_head = data.head_dim if data is not None else ""
    head_dim = int(attrgetter(of_head)(network)) if of_head else facts.width // facts.heads
    return Described(facts, data, head_dim, patch, together, side_by_side)


def describe_request(
    latents: Sequence[Sequence[int]], patch: Sequence[int], text_tokens: int, batch: int, steps: int
) -> RequestFacts:
    """A request's facts.

    Args:
        latents: their sizes without batch and channels. One beside the video is sound: a token at least each moment.
        patch: latent positions that a token takes, by the last dims of the latent.
        text_tokens: that run through the blocks.
        batch: rows, all CFG branches together.
        steps: of the loop; 0 for a single call of the network.
    """
    first, *others = latents
    patch = ((1,) * max(0, len(first) - len(patch)) + tuple(patch[-len(first) :])) if first else ()
    counts = [-(-size // by) for size, by in zip(first, patch, strict=True)]
    tokens = math.prod(counts) + sum(sizes[0] for sizes in others if sizes)
    # Between the frames of a video that are padded to whole tokens, the latent's rows and the tokens' do not meet.
    rows = 1 if len(first) > 2 and first[-2] % patch[-2] else math.prod(counts[:-1])
    request = RequestFacts(tokens, text_tokens, batch, rows, in_pool=steps > 0)
    return replace(request, steps=steps) if steps else request


def _met(found: Sequence[tuple[nn.Module, Blocks]]) -> tuple[int, int, int]:
    """Parameters of all blocks that a token of the picture meets, that one of the text does, and that one row does.

    Streams beside one another have weights of their own, in equal parts. What modulates meets one row per picture. Of
    a cross attention the keys and values, half of it, meet a text that is no stream. The picture attends `again` alone.
    """
    image = text = shared = 0
    for block, blocks in found:
        modulates = sum(_size(block, name) for names in blocks.modulations.values() for name in names)
        aside = sum(_size(block, name) for name in (*blocks.cross, *blocks.texts)) // 2
        again = _size(block, blocks.again) if blocks.again else 0
        own = (_size(block) - modulates - aside - again) // (1 if blocks.parallel else len(blocks.tokens))
        image += own + again
        text += aside or own
        shared += modulates
    return image, text, shared


def _size(block: nn.Module, path: str = "") -> int:
    """Parameters of a submodule; 0 where this block has it not."""
    found = find(block, path) if path else block
    return sum(parameter.numel() for parameter in found.parameters()) if isinstance(found, nn.Module) else 0


def _width(network: nn.Module, data: Network | None) -> int:
    """Of a token in the blocks: what most of a block's products take in; the others take in more, mostly."""
    if data is not None and data.width:
        return int(attrgetter(data.width)(network))
    root = network if data is None else next(iter(network.get_submodule(data.blocks[-1].path).children()))
    widths = [parameter.shape[1] for parameter in root.parameters() if parameter.ndim == 2]
    return max(set(widths), key=lambda width: (widths.count(width), -width)) if widths else 1
