"""The names that the authors of a family gave its tensors, by diffusers' names of the same: of files that ComfyUI reads
with the weights of a diffusers network.

In authors_names.json a pattern is a name in which `*` stands for a block's number ("double_blocks.*.img_mlp.0.weight"),
or `last` for that of the last block of the list. Several parts lie behind one another on dim 0; of `swapped` ones the
halves of dim 0 change places (scale and shift of a modulation).
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch

NAMES = {
    "FluxTransformer2DModel": "flux",
    "Flux2Transformer2DModel": "flux2",
    "HunyuanDiT2DModel": "hunyuan_dit",
    "PixArtTransformer2DModel": "pixart",
    "SD3Transformer2DModel": "sd3",
    "UNet2DConditionModel": "sdxl",
    "WanTransformer3DModel": "wan",
}
"""diffusers' class -> how tests call the family."""
_RESNET = re.compile(r"down_blocks\.(\d+)\.resnets\.(\d+)\..+")
_DEEPEST = 4
"""Names that say where a layer of a U-Net stands, at most: down_blocks, 1, resnets, 0."""


@dataclass(frozen=True)
class Made:
    """What one tensor of the authors' is made of.

    Args:
        parts: diffusers' names, in the order of their rows.
        swapped: its halves change places.
    """

    parts: tuple[str, ...]
    swapped: bool

    def join(self, find: Callable[[str], torch.Tensor]) -> torch.Tensor:
        """The tensor; `find` gives one of diffusers'."""
        joined = torch.cat([find(part) for part in self.parts]) if len(self.parts) > 1 else find(self.parts[0])
        return torch.cat(joined.chunk(2)[::-1]) if self.swapped else joined


@cache
def _patterns(family: str) -> dict[str, tuple[str, int, bool]]:
    """diffusers' pattern -> the authors', which of its parts that is, and whether it is swapped."""
    data = json.loads(Path(__file__).with_suffix(".json").read_text(encoding="utf-8"))[family]
    found = {}
    for source, targets in data["names"].items():
        for number, target in enumerate([targets] if isinstance(targets, str) else targets):
            found[target] = source, number, source in data["swapped"]
    return found


def authors_names(family: str, names: Iterable[str]) -> dict[str, Made]:
    """The authors' names of a whole network's tensors.

    Raises:
        KeyError: a name that is not known.
    """
    names = list(names)
    of_blocks = [name.split(".")[:2] for name in names if name.count(".") > 1]
    last = {blocks: str(max(int(n) for b, n in of_blocks if b == blocks and n.isdigit()))
            for blocks, number in of_blocks if number.isdigit()}  # fmt: skip
    places = _places_of(names) if family == "sdxl" else {}
    patterns, found = _patterns(family), dict[str, list[tuple[int, str, bool]]]()
    for name in names:
        place, rest = _cut(name, places)
        pattern, number = _pattern(rest, patterns, last)
        source, part, swapped = patterns[pattern]
        source = source.replace(".*.", f".{number}.", 1).replace(".last.", f".{number}.", 1)
        found.setdefault(f"{places[place]}.{source}" if place else source, []).append((part, name, swapped))
    return {source: Made(tuple(name for _, name, _ in sorted(of)), of[0][2]) for source, of in found.items()}


def to_authors(family: str, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """A whole network's tensors under their authors' names."""
    return {name: made.join(tensors.__getitem__) for name, made in authors_names(family, tensors).items()}


def _pattern(name: str, patterns: dict[str, tuple[str, int, bool]], last: dict[str, str]) -> tuple[str, str]:
    """The pattern of a name, and its block's number."""
    blocks, _, rest = name.partition(".")
    number, _, rest = rest.partition(".")
    if number == last.get(blocks) and (pattern := f"{blocks}.last.{rest}") in patterns:
        return pattern, number
    return (f"{blocks}.*.{rest}", number) if number.isdigit() and rest else (name, "")


def _places_of(names: Sequence[str]) -> dict[str, str]:
    """Of a U-Net, diffusers' name of each place -> the authors', who number layers one after the other."""
    layers: dict[int, set[str]] = {}
    for found in filter(None, map(_RESNET.fullmatch, names)):
        layers.setdefault(int(found[1]), set()).add(found[2])
    attending = {name.split(".")[1] for name in names if name.startswith("up_blocks.") and ".attentions." in name}
    attends = [str(level) in attending for level in range(len(layers))]
    return {new: old for old, new in _places([len(layers[level]) for level in sorted(layers)], attends)}


def _places(layers: Sequence[int], attends: Sequence[bool]) -> Iterator[tuple[str, str]]:
    """(the authors', diffusers') names of all places; `layers` per resolution from the highest.

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


def _cut(name: str, places: dict[str, str]) -> tuple[str, str]:
    """The place of a U-Net's layer, "" for what stands once, and the name inside of it."""
    names = name.split(".")
    for cut in range(min(_DEEPEST + 1, len(names) - 1), 0, -1):
        if (place := ".".join(names[:cut])) in places:
            return place, ".".join(names[cut:])
    return "", name
