"""Bounds what a written config or a tensor's name may ask for, before anything is built or counted by it."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from ..errors import CheckpointError
from .header import AGAIN

_MOST_BLOCKS = 256
"""In one list. The largest models that are told of have about 60."""
_LARGEST = 1_000_000
_LARGEST_SIZE = 4096
"""Of a picture or a table of positions, whose side it is: memory goes by its square."""
_MOST_VALUES = 1000
_LARGEST_INDEX = 1023
"""In the name of a tensor: of a block, or of one of its experts."""
_DIGITS = 9
"""A longer number is no index to anybody who counts from zero."""
_COUNTED = ("layers", "blocks", "depth")
_FIX = "Download the folder again."


def check_config(path: Path, config: Mapping[str, Any], tensors: int) -> None:
    """CheckpointError, with the value, for numbers that no model has: every layer has one of the tensors at least."""
    values = list(_values("", config))
    if len(values) > _MOST_VALUES:
        what = "{path} holds {values} values, which is no model's config."
        raise CheckpointError(what, _FIX, path=path, values=len(values))
    for name, value in values:
        most = _LARGEST_SIZE if "size" in name else _LARGEST
        if "layers" in name:
            most = min(_MOST_BLOCKS, max(tensors, 1))
        _refuse_large(path, name, value, most, _FIX)


def check_host_header(path: Path, names: Iterable[str], metadata: Mapping[str, str]) -> None:
    """CheckpointError, with the name or the value, for what would have ComfyUI's own recognition count, or build, what
    no model has.

    Args:
        names: of the file's tensors. ComfyUI counts blocks, and looks through all names for each.
        metadata: of its header, whose `config` ComfyUI believes.
    """
    for name in names:
        number = max((int(part) for part in name.split(".") if part.isdecimal() and len(part) < _DIGITS), default=0)
        if number > _LARGEST_INDEX:
            what = "{path} has a tensor {name}, and no model counts further than {largest_index}."
            raise CheckpointError(what, AGAIN, path=path, name=name[:80], largest_index=_LARGEST_INDEX)
    for name, value in _values("", _written_transformer(metadata)):
        most = _MOST_BLOCKS if any(word in name for word in _COUNTED) else _LARGEST
        _refuse_large(path, name, value, most, AGAIN)


def _refuse_large(path: Path, name: str, value: Any, most: int, fix: str) -> None:
    if isinstance(value, int | float) and not -most <= value <= most:
        what = "{path} says {name} {value}, and at most {most} can be."
        raise CheckpointError(what, fix, path=path, name=name[:80], value=str(value)[:40], most=most)


def _written_transformer(metadata: Mapping[str, str]) -> Mapping[str, Any]:
    """What a header's config says of the network; nothing where it is something else, which most families ignore."""
    try:
        config = json.loads(metadata.get("config", "{}"))
    except (ValueError, TypeError, RecursionError):
        return {}
    written = config.get("transformer") if isinstance(config, dict) else None
    return written if isinstance(written, dict) else {}


def _values(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping):
        for key, inner in value.items():
            yield from _values(f"{name}.{key}" if name else str(key), inner)
    elif isinstance(value, list | tuple):
        for inner in value:
            yield from _values(name, inner)
    else:
        yield name, value
