"""Facts of a model from its checkpoint's header, and of a request from its shapes. No module is built."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any

from ..loading.checkpoint import Checkpoint
from ..models.spec import ModelSpec
from .facts import ModelFacts, RequestFacts

_PER_PICTURE = re.compile(r"norm|mod\b|_mod\.|modulation|adaln|time_|timestep|temb")
"""Weights in a block that meet one row per picture, not one per token: modulations."""
_TEXT_ONLY = re.compile(r"_context|add_[kqv]_|add_out|\.txt_|text_|attn2\.to_[kv]\.")
"""Weights in a block that meet text tokens only: joint attention's text side, cross-attention's keys and values."""


def parameter_shapes(checkpoint: Checkpoint) -> dict[str, tuple[int, ...]]:
    """Return the shape of every parameter by its diffusers name."""
    if checkpoint.layout == "diffusers":
        return {name: info.shape for name, info in checkpoint.header.items()}
    shapes = {}
    for rule in checkpoint.spec.weight_rules(checkpoint.config):
        if rule.source in checkpoint.header:  # a file that lacks one is refused when it is loaded
            rows, *others = checkpoint.header[rule.source].shape
            shapes[rule.target] = (rule.rows[1] if rule.rows else rows, *others)
    return shapes


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
    image = text = inside = 0
    for parameters in blocks.values():
        shared, own = _per_token(parameters)
        inside += sum(map(math.prod, parameters.values()))
        image += shared
        # A block without a text side of its own multiplies the text tokens, where there are any, like the others.
        text += own or shared
    heads = spec.heads(config)
    return ModelFacts(
        title=spec.title,
        heads=heads,
        blocks=len(blocks),
        width=_width(blocks, heads, config),
        parameters=sum(map(math.prod, shapes.values())),
        block_parameters=inside,
        image_parameters=image,
        text_parameters=text,
        bytes_per_parameter=bytes_per_parameter,
        has_stages=spec.stages is not None,
        splits_sequence=spec.splits_sequence,
        mirrored=spec.stages is not None and spec.stages.skips,
    )


def _by_block(spec: ModelSpec, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, dict[str, tuple[int, ...]]]:
    """{block path: {parameter name inside of it: shape}}."""
    lists = [re.escape(path).replace(r"\*", r"[^.]+") for path in spec.block_lists]
    pattern = re.compile(rf"((?:{'|'.join(lists)})\.\d+)\.(.+)")
    blocks: dict[str, dict[str, tuple[int, ...]]] = {}
    for name, shape in shapes.items():
        found = pattern.fullmatch(name)
        if found:
            blocks.setdefault(found[1], {})[found[2]] = shape
    return blocks


def _per_token(parameters: Mapping[str, tuple[int, ...]]) -> tuple[int, int]:
    """Return how many weights of a block every image token meets, and how many the text tokens alone."""
    image = text = 0
    for name, shape in parameters.items():
        if len(shape) == 2 and name.endswith("weight") and not _PER_PICTURE.search(name):
            if _TEXT_ONLY.search(f".{name}"):
                text += math.prod(shape)
            else:
                image += math.prod(shape)
    return image, text


def _width(blocks: Mapping[str, Mapping[str, tuple[int, ...]]], heads: int, config: Mapping[str, Any]) -> int:
    if isinstance(config.get("attention_head_dim"), int):
        return heads * config["attention_head_dim"]
    queries = (shapes[name] for shapes in blocks.values() for name in shapes if re.search(r"to_q\w*\.weight$", name))
    return next(queries, (0, 0))[-1] or max(shape[-1] for shapes in blocks.values() for shape in shapes.values())


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
    patch = spec.stages.patch_size if spec.stages is not None else 1
    *frames, height, _ = x_shape[2:]
    rows = math.prod(frames) * -(-height // patch)
    request = RequestFacts(image, whole - image, batch, rows, in_pool=steps > 0)
    return request if not steps else RequestFacts(image, whole - image, batch, rows, steps)
