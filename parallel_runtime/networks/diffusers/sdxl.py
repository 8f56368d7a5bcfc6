"""SDXL (base, refiner, inpainting, and the smaller SSD-1B, Vega and KOALA): diffusers' UNet2DConditionModel as data.

A U-Net: its resolutions are joined by convolutions, which need their neighbours, so no rank takes a share of the
tokens. Ranks share out the rows of a batch, CFG branches and pictures, and each has the whole model.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

import torch

from ...errors import RequestError
from ...said import said
from .adapter import Call, WholeLatentAdapter
from .key_rules import KeyRules, WeightRule
from .spec import ModelSpec

_RESNET = re.compile(r"down_blocks\.(\d{1,3})\.resnets\.(\d{1,3})\..+", re.ASCII)
_DEEPEST = 4
"""Names that say where a layer stands, at most: down_blocks, 1, resnets, 0."""


class UNetKeys(KeyRules):
    """Names that follow from how many layers each resolution has, as the authors number them one after the other; the
    file has the names inside of a layer, and of what stands once."""

    def weight_rules(self, shapes: Mapping[str, Sequence[int]]) -> Iterator[WeightRule]:
        """The rule of each parameter of a U-Net, by diffusers' names."""
        layers: dict[int, set[str]] = {}
        for found in filter(None, map(_RESNET.fullmatch, shapes)):
            layers.setdefault(int(found[1]), set()).add(found[2])
        attending = {name.split(".")[1] for name in shapes if name.startswith("up_blocks.") and ".attentions." in name}
        attends = [str(level) in attending for level in range(len(layers))]
        pairs = _places([len(layers[level]) for level in sorted(layers)], attends)
        places = {new: old for old, new in pairs}
        for name, shape in shapes.items():
            place, rest = _cut(name, places)
            for rule in super().weight_rules({rest: shape}):
                source = f"{places[place]}.{rule.source}" if place else rule.source
                yield replace(rule, target=name, source=source)


def _places(layers: Sequence[int], attends: Sequence[bool]) -> Iterator[tuple[str, str]]:
    """(original, diffusers) names of all places; `layers` per resolution from the highest.

    `attends` says of each resolution of the second half, from the lowest, whether it has attention: what makes it
    larger stands behind that.
    """
    last, number = len(layers) - 1, 1
    for level, count in enumerate(layers):
        for layer in range(count):
            yield f"input_blocks.{number}.0", f"down_blocks.{level}.resnets.{layer}"
            yield f"input_blocks.{number}.1", f"down_blocks.{level}.attentions.{layer}"
            number += 1
        if level < last:
            yield f"input_blocks.{number}.0.op", f"down_blocks.{level}.downsamplers.0.conv"
            number += 1
    yield "middle_block.0", "mid_block.resnets.0"
    yield "middle_block.1", "mid_block.attentions.0"
    yield "middle_block.2", "mid_block.resnets.1"
    number = 0
    for level, count in enumerate(reversed(layers)):
        for layer in range(count + 1):
            yield f"output_blocks.{number}.0", f"up_blocks.{level}.resnets.{layer}"
            yield f"output_blocks.{number}.1", f"up_blocks.{level}.attentions.{layer}"
            number += 1
        if level < last:
            place = 2 if attends[level] else 1
            yield f"output_blocks.{number - 1}.{place}.conv", f"up_blocks.{level}.upsamplers.0.conv"


def _cut(key: str, places: Mapping[str, str]) -> tuple[str, str]:
    """The place of a layer, "" for what stands once, and the name inside of it."""
    names = key.split(".")
    for cut in range(min(_DEEPEST + 1, len(names) - 1), 0, -1):
        place = ".".join(names[:cut])
        if place in places:
            return place, ".".join(names[cut:])
    return "", key


def _micro_conditions(call: Call) -> dict[str, torch.Tensor]:
    """The pooled text and behind it the sinusoids of sizes and crop (arXiv 2307.01952): both are in y."""
    y, width = call.pooled_text(), call.config["projection_class_embeddings_input_dim"]
    if y is None or y.shape[-1] != width:
        raise RequestError(
            said(
                "{title} takes a pooled text with sizes of width {width} in this checkpoint, and got {shape}.",
                title=call.title,
                width=width,
                shape="none" if y is None else f"one of width {y.shape[-1]}",
            ),
            said("Encode the prompt with the text encoders of {title}.", title=call.title),
        )
    # diffusers puts the sinusoids of `time_ids` behind `text_embeds`: of no numbers come no more.
    return {"text_embeds": y, "time_ids": y.new_empty((call.batch, 0))}


SDXL = ModelSpec(
    name="sdxl",
    transformer_class="UNet2DConditionModel",
    # Stable Diffusion 1 and 2 have no sizes beside the text; Kolors has another width of text.
    belongs=lambda config: config.get("addition_embed_type") == "text_time" and not config.get("encoder_hid_dim"),
    whole=tuple(f"{part}.attentions.*.transformer_blocks" for part in ("down_blocks.*", "mid_block", "up_blocks.*")),
    self_attention=(),
    token=4,  # most of the transformer blocks are at a quarter of the resolution
    timestep_embedder="time_proj",
    keys=UNetKeys.read("sdxl"),
    adapter=WholeLatentAdapter(
        "SDXL",
        extras=frozenset({"y"}),
        arguments={"added_cond_kwargs": _micro_conditions},
        latent="sample",
        patch=1,
    ),
    widths={"encoder_hidden_states": "cross_attention_dim"},
)
