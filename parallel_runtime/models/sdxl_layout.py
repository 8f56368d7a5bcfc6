"""How SDXL's U-Net is built, and the weights of Stability AI's files under diffusers' names.

The original numbers all layers through (`input_blocks.0` to `output_blocks.8`), diffusers counts them within blocks of
one resolution. Inside of a transformer block both use the same names.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from .spec import WeightRule
from .weight_rules import linear

_TOP = {
    "conv_in": "input_blocks.0.0",
    "time_embedding.linear_1": "time_embed.0",
    "time_embedding.linear_2": "time_embed.2",
    "add_embedding.linear_1": "label_emb.0.0",
    "add_embedding.linear_2": "label_emb.0.2",
    "conv_norm_out": "out.0",
    "conv_out": "out.2",
}
_RESNET = {
    "norm1": "in_layers.0",
    "conv1": "in_layers.2",
    "time_emb_proj": "emb_layers.1",
    "norm2": "out_layers.0",
    "conv2": "out_layers.3",
}
_ATTENTION = ("norm", "proj_in", "proj_out")
_BLOCK = ("norm1", "norm2", "norm3", "attn1.to_out.0", "attn2.to_out.0", "ff.net.0.proj", "ff.net.2")
_BLOCK_WITHOUT_BIAS = tuple(f"{attention}.to_{part}" for attention in ("attn1", "attn2") for part in "qkv")

ATTENDING = {"down": "CrossAttnDownBlock2D", "mid": "UNetMidBlock2DCrossAttn", "up": "CrossAttnUpBlock2D"}
PLAIN = {"down": "DownBlock2D", "mid": "UNetMidBlock2D", "up": "UpBlock2D"}


@dataclass(frozen=True)
class Layers:
    """Transformer blocks behind every resnet, 0 where there is no attention.

    Args:
        down: per resolution, from the highest.
        mid: between its two resnets; None where there is one resnet alone, -1 without a middle.
        up: per resolution, from the lowest; one layer more than `down` has there.
    """

    down: tuple[tuple[int, ...], ...]
    mid: int | None
    up: tuple[tuple[int, ...], ...]

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> Layers:
        """Read diffusers' config, whose values stand for all resolutions, for one, or for one layer."""
        kinds = config["down_block_types"]
        layers = _per_level(config["layers_per_block"], len(kinds))
        depths = _per_level(config["transformer_layers_per_block"], len(kinds))
        up_depths = config.get("reverse_transformer_layers_per_block") or depths[::-1]
        middle = config.get("mid_block_type")
        last = depths[-1]
        return cls(
            tuple(_depths(ATTENDING["down"] == kinds[i], depths[i], layers[i]) for i in range(len(kinds))),
            (last if isinstance(last, int) else last[0]) if middle == ATTENDING["mid"] else None if middle else -1,
            tuple(
                _depths(ATTENDING["up"] == kind, depth, layer + 1)
                for kind, depth, layer in zip(config["up_block_types"], up_depths, layers[::-1], strict=True)
            ),
        )


def _per_level(value: Any, levels: int) -> Sequence[Any]:
    return [value] * levels if isinstance(value, int) else list(value)


def _depths(attends: bool, depth: Any, layers: int) -> tuple[int, ...]:
    if not attends:
        return (0,) * layers
    return (depth,) * layers if isinstance(depth, int) else tuple(depth)


def weight_rules(config: Mapping[str, Any]) -> Iterator[WeightRule]:
    """Every parameter of diffusers' UNet2DConditionModel out of Stability AI's names."""
    layers = Layers.of(config)
    for target, source in _TOP.items():
        yield from linear(target, source)
    yield from _down(layers, config["block_out_channels"])
    if layers.mid != -1:
        yield from _resnet("mid_block.resnets.0", "middle_block.0", widens=False)
    if layers.mid is not None and layers.mid > 0:
        yield from _attention("mid_block.attentions.0", "middle_block.1", layers.mid)
        yield from _resnet("mid_block.resnets.1", "middle_block.2", widens=False)
    yield from _up(layers)


def _down(layers: Layers, channels: Sequence[int]) -> Iterator[WeightRule]:
    number = 1
    for level, depths in enumerate(layers.down):
        block = f"down_blocks.{level}"
        for layer, depth in enumerate(depths):
            widens = layer == 0 and level > 0 and channels[level] != channels[level - 1]
            yield from _resnet(f"{block}.resnets.{layer}", f"input_blocks.{number}.0", widens)
            yield from _attention(f"{block}.attentions.{layer}", f"input_blocks.{number}.1", depth)
            number += 1
        if level < len(layers.down) - 1:
            yield from linear(f"{block}.downsamplers.0.conv", f"input_blocks.{number}.0.op")
            number += 1


def _up(layers: Layers) -> Iterator[WeightRule]:
    number = 0
    for level, depths in enumerate(layers.up):
        block = f"up_blocks.{level}"
        for layer, depth in enumerate(depths):
            # What a layer of the first half kept comes in beside the input, so that all of these change the width.
            yield from _resnet(f"{block}.resnets.{layer}", f"output_blocks.{number}.0", widens=True)
            yield from _attention(f"{block}.attentions.{layer}", f"output_blocks.{number}.1", depth)
            number += 1
        if level < len(layers.up) - 1:
            place = 2 if depths[-1] else 1
            yield from linear(f"{block}.upsamplers.0.conv", f"output_blocks.{number - 1}.{place}.conv")


def _resnet(new: str, old: str, widens: bool) -> Iterator[WeightRule]:
    for target, source in _RESNET.items():
        yield from linear(f"{new}.{target}", f"{old}.{source}")
    if widens:
        yield from linear(f"{new}.conv_shortcut", f"{old}.skip_connection")


def _attention(new: str, old: str, depth: int) -> Iterator[WeightRule]:
    for name in _ATTENTION if depth else ():
        yield from linear(f"{new}.{name}", f"{old}.{name}")
    for index in range(depth):
        block = f"transformer_blocks.{index}"
        for names, bias in ((_BLOCK, True), (_BLOCK_WITHOUT_BIAS, False)):
            for name in names:
                yield from linear(f"{new}.{block}.{name}", f"{old}.{block}.{name}", bias=bias)
