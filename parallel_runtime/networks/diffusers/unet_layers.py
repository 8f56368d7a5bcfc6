"""Which layers a U-Net has, by diffusers' names, and how diffusers' config tells them."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from .headers import MOST_BLOCKS

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
