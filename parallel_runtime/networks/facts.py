"""What plans are made from: facts of a network without weights and its table entry, of ComfyUI's with all that is known
of it then, and of a request by its shapes."""

from __future__ import annotations

import inspect
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from operator import attrgetter

from torch import nn

from ..requests.facts import PLAIN, QUANTISED, ModelFacts, RequestFacts
from ..said import said
from .block_arguments import KEYWORD
from .tables.blocks import Blocks, Network, find
from .tables.comfyui import find_network
from .tables.image import CONVOLVES


def describe(
    network: nn.Module, data: Network | None, title: str, number_bytes: int, patch: Sequence[int], why: str = CONVOLVES,
    takes: str = PLAIN,
) -> ModelFacts:  # fmt: skip
    """Facts of a network on the meta device, whose weights have so many bytes each, on average. `data` is None where
    ranks share out the batch alone, and `why`; `patch`: latent positions of a token, by the last dims of the latent;
    `takes`: what blocks' layers take, see `HostFile.takes`."""
    lists = data.blocks if data is not None else ()
    found = [(block, blocks) for blocks in lists for block in network.get_submodule(blocks.path).children()]
    total = _size(network)
    image, text, shared = _met(found) if found else (total, total, 0)
    square = len(patch) > 1 and patch[-1] == patch[-2] and set(patch[:-2]) <= {1}  # stages cut a latent by its rows
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
        has_stages=data is not None and data.stages and square and all(each.can_cut(block) for block, each in found),
        why_whole="" if data is not None else why,
        shared_parameters=shared,
        parallel_blocks=sum(takes == PLAIN and blocks.parallel and _hides(block) for block, blocks in found),
        projecting_blocks=sum(takes != QUANTISED and _projects(block, blocks) for block, blocks in found),
        takes=takes,
        head_dim=int(attrgetter(data.head_dim)(network)) if data and data.head_dim else 0,
    )


def _hides(block: nn.Module) -> bool:
    """Whether the feed-forward layer beside a block's attention is one that acceleration/attention_pass.py knows."""
    known = ("GELU", "SiLUActivation")
    return any(type(module).__name__ in known for module in block.modules())


def _projects(block: nn.Module, blocks: Blocks) -> bool:
    return blocks.projects is not None and all(find(block, name) == each for name, each in blocks.projects.items())


def patch_of(network: nn.Module, dims: int) -> tuple[int, ...]:
    """Latent positions that a token takes along each of the last `dims` dims, by what the network says."""
    given = getattr(network, "patch_size", None)
    sizes = (given, given) if isinstance(given, int) else given
    if isinstance(sizes, (list, tuple)) and sizes and all(isinstance(each, int) for each in sizes):
        return (*((1,) * (dims - len(sizes))), *sizes[-dims:])
    return (1,) * dims


@dataclass(frozen=True)
class Described:
    """What is known of a network of ComfyUI's; `data` and `patch` as of `describe`, the last two of its table entry."""

    facts: ModelFacts
    data: Network | None
    head_dim: int
    patch: tuple[int, ...]
    rows_together: bool
    side_by_side: bool


def describe_network(network: nn.Module, size: int, latent_dimensions: int, takes: str = PLAIN) -> Described:
    """Of a network on the meta device, with weights of `size` bytes and latents of so many dims of space or time."""
    unknown = Network(type(network).__name__, whole=said("this pack does not know it yet"))
    known = find_network(type(network)) or unknown
    if not (why := known.whole) and (unlike := unknown_blocks(network, known.blocks)):
        why = said("this ComfyUI has another version of it, {unlike}", unlike=unlike)
    data = None if why else known
    patch = patch_of(network, latent_dimensions)
    total = max(1, sum(parameter.numel() for parameter in network.parameters()))
    facts = describe(network, data, known.title, max(1, round(size / total)), patch, why, takes)
    head_dim = facts.heads_width // facts.heads
    return Described(facts, data, head_dim, patch, known.rows_together, known.side_by_side)


def unknown_blocks(network: nn.Module, lists: Sequence[Blocks]) -> str:
    """Why the network is not as the data says, in words; "" where it is."""
    for blocks in lists:
        try:
            found = list(network.get_submodule(blocks.path).children())
        except AttributeError:
            return f"it has no {blocks.path}"
        fitting = [block for block in found if blocks.can_cut(block)]
        if found and not fitting:
            is_so = ", ".join(f"{name} {find(found[0], name)}" for name in (*blocks.when, *blocks.unless))
            return f"its {blocks.path} have {is_so}"
        for block in fitting:
            parameters = inspect.signature(block.forward).parameters.values()
            taken = {each.name for each in parameters if each.kind is not KEYWORD}
            if blocks.positional and taken == {"args"}:
                taken = set(blocks.positional)
            if extra := taken - blocks.names:
                return f"a block of {blocks.path} takes {', '.join(sorted(extra))}"
            if missing := {name.partition(".")[0] for name in blocks.tokens} - taken:
                return f"a block of {blocks.path} takes no {', '.join(sorted(missing))}"
            for name in (*blocks.cross, *blocks.gathers, *blocks.apart):
                if find(block, name) is None:
                    return f"a block of {blocks.path} has no {name}"
    return ""


def describe_request(
    latents: Sequence[Sequence[int]], patch: Sequence[int], text_tokens: int, batch: int, steps: int
) -> RequestFacts:
    """A request's facts, of latents without batch and channels (one beside the video is sound: a token at least each
    moment), of a token's latent positions by their last dims, of the text's tokens that run through the blocks, of the
    rows of all CFG branches together, and of the loop's steps, 0 for a single call of the network."""
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
    Streams have weights of their own, in equal parts. What modulates meets one row per picture. Of a cross attention
    the keys and values, half of it, meet a text that is no stream. The picture attends `again` alone."""
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
