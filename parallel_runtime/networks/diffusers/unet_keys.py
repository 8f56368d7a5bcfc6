"""Where a U-Net's layers stand, in Stability AI's names and in diffusers' names.

The original numbers all layers through (`input_blocks.0` to `output_blocks.8`), diffusers counts them within blocks of
one resolution. Inside of a layer both differ by names alone, and those are data (`KeyRules`).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from .headers import count_blocks
from .key_rules import KeyRules
from .spec import TensorInfo, WeightRule
from .unet_layers import UNetLayers

_OWN = re.compile(r"(down_blocks|mid_block|up_blocks|conv_in|conv_out|conv_norm_out|time_embedding|add_embedding)\.")
"""What diffusers' keys begin with."""
_DEEPEST = 4
"""Names that say where a layer stands, at most: down_blocks, 1, resnets, 0."""


@dataclass(frozen=True)
class UNetKeys:
    """See `Keys`. `inside` has the names inside of a layer, and those of what stands once."""

    inside: KeyRules

    def to_diffusers(self, header: Mapping[str, TensorInfo]) -> dict[str, TensorInfo]:
        """An original-layout header in diffusers' names; keys that have no rule and are not diffusers' stay."""
        layers = [0]
        for number in range(1, count_blocks(header, "input_blocks.")):
            if f"input_blocks.{number}.0.op.weight" in header:
                layers.append(0)
            else:
                layers[-1] += 1
        places = dict(_places(layers, lambda level, number: f"output_blocks.{number}.2.conv.weight" in header))
        renamed = {}
        for key, info in header.items():
            place, rest = _cut(key, places)
            (name,) = self.inside.to_diffusers({rest: info}) or ("",)
            if name and (place or name != key):
                renamed[f"{places[place]}.{name}" if place else name] = info
            elif not _OWN.match(key):
                renamed[key] = info
        return renamed

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
