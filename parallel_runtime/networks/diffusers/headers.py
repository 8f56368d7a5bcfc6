"""Headers by key rules, and numbered blocks in them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace

from .spec import Keys, TensorInfo

MOST_BLOCKS = 256
"""In one list. The largest models that are told of have about 60."""


def count_blocks(header: Iterable[str], blocks: str) -> int:
    """Blocks of a list whose keys start with `blocks` ("double_blocks."), by the highest number.

    A hole in the numbering shows up later, as missing tensors. Numbers beyond any model's are no blocks: nobody shall
    count up to a billion because a file says so.
    """
    numbers = {key[len(blocks) :].split(".", 1)[0] for key in header if key.startswith(blocks)}
    found = (int(number) for number in numbers if number.isascii() and number.isdigit() and len(number) < 10)
    return 1 + max((number for number in found if number < MOST_BLOCKS), default=-1)


def original_header(keys: Keys, header: Mapping[str, TensorInfo]) -> dict[str, TensorInfo]:
    """Header that a file with diffusers' names would have in the original layout; what has no rule is left out."""
    original: dict[str, TensorInfo] = {}
    for rule in keys.weight_rules({name: info.shape for name, info in header.items()}):
        info = header[rule.target]
        if rule.rows is not None and info.shape:
            rows = max(sum(rule.rows), original[rule.source].shape[0] if rule.source in original else 0)
            info = replace(info, shape=(rows, *info.shape[1:]))
        original[rule.source] = info
    return original
