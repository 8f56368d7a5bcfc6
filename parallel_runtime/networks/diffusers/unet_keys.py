"""The authors' names of a U-Net's tensors: layers are numbered one after the other there, and by resolution here."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from .key_rules import KeyRules, WeightRule

_RESNET = re.compile(r"down_blocks\.(\d{1,3})\.resnets\.(\d{1,3})\..+", re.ASCII)
_DEEPEST = 4
"""Names that say where a layer stands, at most: down_blocks, 1, resnets, 0."""


@dataclass(frozen=True)
class UNetKeys:
    """Names that follow from how many layers each resolution has; `inside` has those inside of a layer, and of what
    stands once."""

    inside: KeyRules

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
            for rule in self.inside.weight_rules({rest: shape}):
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
