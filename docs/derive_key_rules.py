"""`python docs/derive_key_rules.py FAMILY [FILE]`: key rules of a family, by running diffusers' own converter.

Every row of every tensor gets a number of its own; where the numbers come out tells what the converter does. FILE is a
safetensors file with the authors' names, from which the keys are taken; without one they are those of the checked-in
rules, parallel_runtime/networks/diffusers/keys/FAMILY.json, which the command writes. Written by hand stay: the whole
file of a family that diffusers has no converter for (`converter` is null), SDXL's, whose layers the converter numbers
anew (sdxl.py), and `by_hand`, what a converter leaves. tests/parallel_runtime/test_key_rules.py derives all again.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch

FOLDER = Path(__file__).resolve().parents[1] / "parallel_runtime" / "networks" / "diffusers" / "keys"
CONVERTERS = {
    "flux": "convert_flux_transformer_checkpoint_to_diffusers",
    "flux2": "convert_flux2_transformer_checkpoint_to_diffusers",
    "sd3": "convert_sd3_transformer_checkpoint_to_diffusers",
    "wan": "convert_wan_transformer_to_diffusers",
}
"""In diffusers.loaders.single_file_utils. It has none for PixArt and HunyuanDiT."""
BLOCKS = 3
ROWS = 7 * 3072
"""Of every marked tensor. Two converters know one width alone: that of FLUX.1's blocks, and of SD3's text."""
KNOWN_ROWS = {"context_embedder.weight": 1536}


def derive(family: str, sources: Iterable[str]) -> dict[str, Any]:
    """Rules of these source patterns ("double_blocks.*.img_mlp.0.weight"), as the JSON file holds them."""
    from diffusers.loaders import single_file_utils

    patterns = dict.fromkeys(re.sub(r"\.last\.", ".*.", source, count=1) for source in sources)
    keys = [
        pattern.replace(".*.", f".{i}.", 1) for pattern in patterns for i in range(BLOCKS if ".*." in pattern else 1)
    ]
    marked = {
        key: (torch.arange(KNOWN_ROWS.get(key, ROWS)) + number * ROWS)[:, None] for number, key in enumerate(keys)
    }
    converted = getattr(single_file_utils, CONVERTERS[family])(dict(marked))
    whole: dict[str, str] = {}
    swapped: dict[str, str] = {}
    fused: dict[str, dict[int, tuple[str, int]]] = {}
    for target, tensor in converted.items():
        numbers = tensor[:, 0].tolist()
        source = keys[numbers[0] // ROWS]
        first, rows = numbers[0] % ROWS, len(marked[source])
        if numbers == list(range(numbers[0], numbers[0] + len(numbers))):
            if len(numbers) == rows:
                whole[source] = target
            else:
                fused.setdefault(source, {})[first] = (target, len(numbers))
        elif torch.equal(tensor, torch.cat(marked[source].chunk(2)[::-1])):
            swapped[source] = target
        else:
            raise ValueError(f"{target} takes rows of {source} in an order that rules cannot tell.")
    parts = {source: dict(found[first] for first in sorted(found)) for source, found in fused.items()}
    shares = {source: {target: n // min(part.values()) for target, n in part.items()} for source, part in parts.items()}
    return {
        "converter": CONVERTERS[family],
        "whole": _without_numbers(whole),
        "swapped": _without_numbers(swapped),
        "fused": _without_numbers(shares),
    }


def _without_numbers(rules: Mapping[str, Any]) -> dict[str, Any]:
    """Rules with patterns, where every block has the same; those of the last block alone say so."""
    found: dict[str, Any] = {}
    for source, value in rules.items():
        pattern, number = _pattern(source)
        same = f"{pattern.replace('.*.', '.0.', 1)}" in rules
        mark = "*" if same else "last"
        if same or number in ("", str(BLOCKS - 1)):
            found[pattern.replace("*", mark, 1)] = _renumbered(value, number, mark)
    return found


def _renumbered(value: Any, number: str, mark: str) -> Any:
    if isinstance(value, dict):
        return {_renumbered(target, number, mark): share for target, share in value.items()}
    return value.replace(f".{number}.", f".{mark}.", 1) if number else value


def _pattern(key: str) -> tuple[str, str]:
    """("double_blocks.*.img_mlp.0.weight", "2") of double_blocks.2.img_mlp.0.weight."""
    found = re.match(r"(\w*blocks)\.(\d+)\.", key)
    return (f"{found[1]}.*.{key[found.end() :]}", found[2]) if found else (key, "")


def sources_of(rules: Mapping[str, Any]) -> list[str]:
    """The source patterns of a rules file that the converter tells of."""
    return [source for kind in ("whole", "swapped", "fused") for source in rules[kind]]


def main(family: str, file: str | None = None) -> None:
    path = FOLDER / f"{family}.json"
    if file is None:
        sources = sources_of(json.loads(path.read_text(encoding="utf-8")))
    else:
        from safetensors import safe_open

        with safe_open(file, "pt") as tensors:
            sources = [_pattern(key.removeprefix("model.diffusion_model."))[0] for key in tensors.keys()]  # noqa: SIM118
    by_hand = json.loads(path.read_text(encoding="utf-8"))["by_hand"] if path.exists() else {}
    path.write_text(json.dumps({**derive(family, sources), "by_hand": by_hand}, indent=2) + "\n", encoding="utf-8")
    print(f"wrote {path}")


if __name__ == "__main__":
    main(*sys.argv[1:])
