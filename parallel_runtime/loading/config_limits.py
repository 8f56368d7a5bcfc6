"""Bounds what a written config may ask for, before anything is built or counted by it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from ..errors import CheckpointError
from ..networks.diffusers.headers import MOST_BLOCKS

_LARGEST = 1_000_000
_LARGEST_SIZE = 4096
"""Of a picture or a table of positions, whose side it is: memory goes by its square."""
_MOST_VALUES = 1000


def check_config(path: Path, config: Mapping[str, Any], tensors: int) -> None:
    """Refuse numbers that no model has.

    Args:
        path: of the config, for the message.
        tensors: how many its files have; every layer has one at least.

    Raises:
        CheckpointError: with the value.
    """
    values = list(_values("", config))
    if len(values) > _MOST_VALUES:
        raise CheckpointError(f"{path} holds {len(values)} values, which is no model's config.", _FIX)
    for name, value in values:
        most = _LARGEST
        if "layers" in name:
            most = min(MOST_BLOCKS, max(tensors, 1))
        elif "size" in name:
            most = _LARGEST_SIZE
        if isinstance(value, int | float) and not -most <= value <= most:
            raise CheckpointError(f"{path} says {name} {str(value)[:40]}, and at most {most} can be.", _FIX)


_FIX = "Download the folder again."


def _values(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping):
        for key, inner in value.items():
            yield from _values(f"{name}.{key}" if name else str(key), inner)
    elif isinstance(value, list | tuple):
        for inner in value:
            yield from _values(name, inner)
    else:
        yield name, value
