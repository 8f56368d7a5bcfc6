"""What the families' weight rules have in common: linear layers, fused projections, numbered blocks."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace

from .spec import TensorInfo, WeightRule

MOST_BLOCKS = 256
"""In one list. The largest models that are told of have about 60."""


def linear(
    target: str, source: str, rows: tuple[int, int] | None = None, swap_halves: bool = False, bias: bool = True
) -> Iterator[WeightRule]:
    """Rules for weight and bias of one linear layer (or convolution); the arguments are those of `WeightRule`."""
    for end in ("weight", "bias") if bias else ("weight",):
        yield WeightRule(f"{target}.{end}", f"{source}.{end}", rows, swap_halves)


def fused(targets: Mapping[str, int], source: str, bias: bool = True) -> Iterator[WeightRule]:
    """Rules for linear layers whose rows follow one another in one source; `targets` are name -> rows, in order."""
    start = 0
    for target, rows in targets.items():
        yield from linear(target, source, (start, rows), bias=bias)
        start += rows


def count_blocks(header: Mapping[str, TensorInfo], blocks: str) -> int:
    """Blocks of a list whose keys start with `blocks` ("double_blocks."), by the highest number.

    A hole in the numbering shows up later, as missing tensors. Numbers beyond any model's are no blocks: nobody shall
    count up to a billion because a file says so.
    """
    numbers = {key[len(blocks) :].split(".", 1)[0] for key in header if key.startswith(blocks)}
    found = (int(number) for number in numbers if number.isascii() and number.isdigit() and len(number) < 10)
    return 1 + max((number for number in found if number < MOST_BLOCKS), default=-1)


def original_header(rules: Iterable[WeightRule], header: Mapping[str, TensorInfo]) -> dict[str, TensorInfo]:
    """Header that a file with diffusers' names would have in the original layout; what it lacks is left out."""
    original: dict[str, TensorInfo] = {}
    for rule in rules:
        info = header.get(rule.target)
        if info is None:
            continue
        if rule.rows is not None and info.shape:
            rows = max(sum(rule.rows), original[rule.source].shape[0] if rule.source in original else 0)
            info = replace(info, shape=(rows, *info.shape[1:]))
        original[rule.source] = info
    return original
