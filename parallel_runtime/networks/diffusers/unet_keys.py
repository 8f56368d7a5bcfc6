"""Which layers a U-Net has, by diffusers' names, and how diffusers' config tells them."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from .headers import MOST_BLOCKS
from .key_rules import KeyRules
from .spec import WeightRule

_LAYER = re.compile(r"(down|mid|up)_blocks?\.(?:(\d{1,3})\.)?(resnets|attentions)\.(\d{1,3})\.(.+)", re.ASCII)
_BLOCK = re.compile(r"transformer_blocks\.(\d{1,3})\.", re.ASCII)


@dataclass(frozen=True)
class UNetLayers:
    """Transformer blocks behind every resnet, 0 where there is no attention.

    Args:
        down: per resolution, from the highest.
        mid: between its two resnets; None where there is no middle.
        up: per resolution, from the lowest; one layer more than `down` has there.
    """

    down: tuple[tuple[int, ...], ...]
    mid: int | None
    up: tuple[tuple[int, ...], ...]

    @classmethod
    def read(cls, names: Iterable[str]) -> UNetLayers | None:
        """The layers that diffusers' names tell; None where they are no whole U-Net."""
        depths: dict[tuple[str, int], dict[int, int]] = {}
        attentions: dict[tuple[str, int, int], int] = {}
        for name in names:
            if not (found := _LAYER.fullmatch(name)):
                continue
            part, level, kind, layer, rest = found[1], int(found[2] or 0), found[3], int(found[4]), found[5]
            if kind == "resnets":
                depths.setdefault((part, level), {})[layer] = 0
            elif (block := _BLOCK.match(rest)) and int(block[1]) < MOST_BLOCKS:
                key = part, level, layer
                attentions[key] = max(attentions.get(key, 0), 1 + int(block[1]))
        for (part, level, layer), depth in attentions.items():
            if layer not in depths.get((part, level), {}):
                return None
            depths[part, level][layer] = depth
        down, mid, up = (
            _in_order({level: _in_order(layers) for (side, level), layers in depths.items() if side == part})
            for part in ("down", "mid", "up")
        )
        if not down or [len(layers) + 1 for layers in down[::-1]] != [len(layers) for layers in up]:
            return None
        return cls(down, mid[0][0] if mid else None, up)

    def config(self) -> dict[str, Any]:
        """What diffusers' config says of the layers: a number where they are alike."""
        attends = [any(level) for level in self.down]
        levels = [_short(level) or 1 for level in self.down]
        if self.mid and not attends[-1]:
            levels[-1] = self.mid  # the middle goes by the lowest resolution's number
        mirrored = all(set(up) == set(level) for up, level in zip(self.up, self.down[::-1], strict=True))
        alike = mirrored and all(isinstance(level, int) for level in levels)
        plain = None if self.mid is None else "UNetMidBlock2D"
        return {
            "down_block_types": tuple("CrossAttnDownBlock2D" if attending else "DownBlock2D" for attending in attends),
            "mid_block_type": "UNetMidBlock2DCrossAttn" if self.mid else plain,
            "up_block_types": tuple("CrossAttnUpBlock2D" if any(level) else "UpBlock2D" for level in self.up),
            "layers_per_block": _short([len(level) for level in self.down]),
            "transformer_layers_per_block": tuple(levels),
            "reverse_transformer_layers_per_block": None if alike else tuple(_short(level) or 1 for level in self.up),
        }


def _in_order(found: Mapping[int, object]) -> tuple:
    """Values by number, as long as none is missing."""
    return tuple(found[number] for number in range(len(found)) if number in found)


def _short(values: Sequence[int]) -> int | tuple[int, ...]:
    return values[0] if len(set(values)) == 1 else tuple(values)


_DEEPEST = 4
"""Names that say where a layer stands, at most: down_blocks, 1, resnets, 0."""


@dataclass(frozen=True)
class UNetKeys:
    """See `Keys`. `inside` has the names inside of a layer, and those of what stands once."""

    inside: KeyRules

    def weight_rules(self, shapes: Mapping[str, Sequence[int]]) -> Iterator[WeightRule]:
        """The rule of each parameter of a U-Net, by diffusers' names."""
        if (layers := UNetLayers.read(shapes)) is None:
            return
        pairs = _places([len(depths) for depths in layers.down], lambda level, number: any(layers.up[level]))
        places = {new: old for old, new in pairs}
        for name, shape in shapes.items():
            place, rest = _cut(name, places)
            for rule in self.inside.weight_rules({rest: shape}):
                source = f"{places[place]}.{rule.source}" if place else rule.source
                yield replace(rule, target=name, source=source)


def _places(layers: Sequence[int], attends: Callable[[int, int], bool]) -> Iterator[tuple[str, str]]:
    """(original, diffusers) names of all places; `layers` per resolution from the highest.

    `attends` says of a resolution of the second half, counted from the lowest, and of its last number, whether it has
    attention: what makes it larger stands behind that.
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
            place = 2 if attends(level, number - 1) else 1
            yield f"output_blocks.{number - 1}.{place}.conv", f"up_blocks.{level}.upsamplers.0.conv"


def _cut(key: str, places: Mapping[str, str]) -> tuple[str, str]:
    """The place of a layer, "" for what stands once, and the name inside of it."""
    names = key.split(".")
    for cut in range(min(_DEEPEST + 1, len(names) - 1), 0, -1):
        place = ".".join(names[:cut])
        if place in places:
            return place, ".".join(names[cut:])
    return "", key
