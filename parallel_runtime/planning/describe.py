"""Facts of a model from its checkpoint's header, and of a request from its shapes. No module is built."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from fnmatch import fnmatchcase
from typing import Any

from ..loading.checkpoint import Checkpoint
from ..networks.diffusers.spec import ModelSpec
from ..networks.tables.diffusers import DIFFUSERS, cut_of
from ..requests.facts import ModelFacts, RequestFacts


def parameter_shapes(checkpoint: Checkpoint) -> dict[str, tuple[int, ...]]:
    """Return the shape of every parameter by its diffusers name."""
    return {name: info.shape for name, info in checkpoint.header.items()}


def describe_model(
    spec: ModelSpec, config: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]], bytes_per_parameter: int
) -> ModelFacts:
    """Return a model's facts.

    Args:
        config: diffusers config.
        shapes: of the parameters, by diffusers name.
        bytes_per_parameter: of the dtype that it is loaded in.
    """
    blocks = _by_block(spec, shapes)
    image = text = 0
    for parameters in blocks.values():
        shared, own = _per_token(spec, parameters)
        image += shared
        # A block without a text side of its own multiplies the text tokens, where there are any, like the others.
        text += own or shared
    return ModelFacts(
        title=spec.title,
        heads=spec.heads(config),
        width=spec.token_width(config),
        parameters=sum(map(math.prod, shapes.values())),
        block_sizes=tuple(sum(map(math.prod, parameters.values())) for parameters in blocks.values()),
        attentions=tuple(_attentions(spec, path, parameters) for path, parameters in blocks.items()),
        image_parameters=image,
        text_parameters=text,
        bytes_per_parameter=bytes_per_parameter,
        has_stages=spec.transformer_class in DIFFUSERS,
        splits_sequence=spec.splits_sequence,
        shared_parameters=_shared(spec, blocks),
        parallel_blocks=sum(path.rpartition(".")[0] in spec.parallel_blocks for path in blocks),
    )


def _by_block(spec: ModelSpec, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, dict[str, tuple[int, ...]]]:
    """{block path: {parameter name inside of it: shape}}, in forward order: a file may have them in any other."""
    patterns = [re.compile(rf"({_as_regex(path)})\.(\d+)\.(.+)") for path in spec.block_lists]
    blocks: dict[tuple[int, str, int], dict[str, tuple[int, ...]]] = {}
    for name, shape in shapes.items():
        for place, pattern in enumerate(patterns):
            if found := pattern.fullmatch(name):
                blocks.setdefault((place, found[1], int(found[2])), {})[found[3]] = shape
    return {f"{key[1]}.{key[2]}": blocks[key] for key in sorted(blocks)}


def _as_regex(pattern: str) -> str:
    """A path in which a star stands for one part."""
    return re.escape(pattern).replace(r"\*", r"[^.]+")


def _attentions(spec: ModelSpec, path: str, parameters: Iterable[str]) -> int:
    """Count a block's layers of self-attention."""
    names = (name.split(".") for name in parameters)
    modules = {".".join([path, *parts[:depth]]) for parts in names for depth in range(1, len(parts))}
    return sum(any(re.fullmatch(_as_regex(pattern), module) for pattern in spec.self_attention) for module in modules)


def _per_token(spec: ModelSpec, parameters: Mapping[str, tuple[int, ...]]) -> tuple[int, int]:
    """Return how many weights of a block every image token meets, and how many the text tokens alone."""
    image = text = 0
    for name, shape in parameters.items():
        layer, _, parameter = name.rpartition(".")
        if len(shape) != 2 or parameter != "weight" or _is_like(layer, spec.picture_layers):
            continue
        if _is_like(layer, spec.text_layers):
            text += math.prod(shape)
        else:
            image += math.prod(shape)
    return image, text


def _is_like(layer: str, patterns: Iterable[str]) -> bool:
    return any(fnmatchcase(layer, pattern) for pattern in patterns)


def _shared(spec: ModelSpec, blocks: Mapping[str, Mapping[str, tuple[int, ...]]]) -> int:
    """Count the weights in blocks that ranks multiply in shares."""
    patterns = [
        _as_regex(f"{cut.path}.*.{layer}") + r"\.weight"
        for cut in cut_of(spec.transformer_class)
        for layers in cut.modulations.values()
        for layer in layers
    ]
    return sum(
        math.prod(shape)
        for path, parameters in blocks.items()
        for name, shape in parameters.items()
        if any(re.fullmatch(pattern, f"{path}.{name}") for pattern in patterns)
    )


def describe_request(
    spec: ModelSpec,
    x_shape: tuple[int, ...],
    context_shape: tuple[int, ...],
    *,
    batch: int,
    steps: int = 0,
) -> RequestFacts:
    """Return a request's facts.

    Args:
        x_shape: latent, (B, C, H, W) or (B, C, F, H, W).
        context_shape: text, (B, T, D).
        batch: rows, all CFG branches together.
        steps: of the loop; 0 for a single call of the transformer.
    """
    image = spec.adapter.sequence_length(x_shape, (*context_shape[:1], 0, *context_shape[2:]))
    whole = spec.adapter.sequence_length(x_shape, context_shape)
    patch = spec.token
    *frames, height, _ = x_shape[2:]
    # Between the frames of a video that are padded to whole tokens, the latent's rows and the tokens' do not meet.
    rows = 1 if frames and height % patch else math.prod(frames) * -(-height // patch)
    request = RequestFacts(image, whole - image, batch, rows, in_pool=steps > 0)
    return request if not steps else RequestFacts(image, whole - image, batch, rows, steps)
