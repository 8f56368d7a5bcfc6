"""The pack ComfyUI-GGUF, from where ComfyUI has it: its reader of GGUF files and its operations on their weights.

A file's header (https://github.com/ggml-org/ggml/blob/master/docs/gguf.md) is checked before the package `gguf` sees
it, which believes every count: an array that promises 2**60 numbers would fill the memory of ComfyUI's process.
"""

from __future__ import annotations

import hashlib
import importlib
import math
import struct
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from ..errors import CheckpointError, ConfigurationError, UnsupportedModelError
from .files import reading
from .header import AGAIN, LARGEST_HEADER, LONGEST_KEY, MOST_TENSORS

SUFFIX = ".gguf"
_LONGEST_REASON = 300


@dataclass(frozen=True)
class GgufPack:
    """The pack's code."""

    folder: str
    read: Callable[[str], dict[str, torch.Tensor]]
    """Path -> weights by the names of ComfyUI's network, as they are in the file, which is mapped."""
    operations: Callable[[], Any]  # ComfyUI's layers, over such weights
    sizes: Mapping[int, tuple[int, int]]  # see `check_gguf_header`

    def read_file(self, path: Path) -> dict[str, torch.Tensor]:
        """The weights. CheckpointError: missing or damaged. UnsupportedModelError: the pack cannot read them."""
        check_gguf_header(path, self.sizes)
        try:
            return self.read(str(path))
        except (ArithmeticError, AttributeError, LookupError, OSError, RuntimeError, TypeError, ValueError) as error:
            reason = " ".join(str(error).split())[:_LONGEST_REASON].rstrip(".")
            what = "ComfyUI-GGUF cannot read {path}: {reason}."
            fix = "Update ComfyUI-GGUF, or choose another file."
            raise UnsupportedModelError(what, fix, path=path, reason=reason) from error


def open_pack(folder: str) -> GgufPack:
    """Import what is needed of the pack, and not its nodes, which want ComfyUI's server. ConfigurationError: it is not
    there, is another version, or its package `gguf` is missing."""
    if not (Path(folder) / "loader.py").is_file():
        fix = "Install it at the same place on every host, or choose a safetensors file."
        raise ConfigurationError("There is no ComfyUI-GGUF in {folder} on the host of this worker.", fix, folder=folder)
    name = f"gguf_pack_{hashlib.sha256(folder.encode()).hexdigest()[:12]}"
    if name not in sys.modules:
        package = ModuleType(name)
        package.__path__ = [folder]
        sys.modules[name] = package
    try:
        reader, operations = (importlib.import_module(f"{name}.{part}") for part in ("loader", "ops"))
        return GgufPack(folder, reader.gguf_sd_loader, operations.GGMLOps, reader.gguf.GGML_QUANT_SIZES)
    except (ImportError, AttributeError) as error:
        what = "ComfyUI-GGUF in {folder} cannot be used: {error}."
        fix = "Update it, and install its requirements."
        raise ConfigurationError(what, fix, folder=folder, error=error) from error


_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_MOST_VALUES = 1 << 18  # in all arrays; the reader makes an object of each, and models have a few for each tensor
_MOST_DIMS = 8
_DEEPEST = 4
_SHAPE = "comfy.gguf.orig_shape."
_ALIGNMENT = "general.alignment"
_STRING, _ARRAY = 8, 9
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}


def check_gguf_header(path: Path, sizes: Mapping[int, tuple[int, int]]) -> None:
    """CheckpointError, with what is wrong, for a file that cannot be read, or whose header promises more than it holds,
    or than any model has. `sizes`: number of a tensor's type -> (numbers in a block, bytes of a block)."""
    with reading(path), path.open("rb") as file:
        size = path.stat().st_size
        start = file.read(min(size, LARGEST_HEADER))
    try:
        _Header(start, size).check(sizes)
    except ValueError as error:
        what = "{path} has a damaged header ({error})."
        raise CheckpointError(what, AGAIN, path=path, error=str(error)[:200]) from error


class _Header:
    """The begin of a file of so many bytes, a header at most, read from front to back; ValueError where it is wrong."""

    def __init__(self, start: bytes, size: int):
        self._start = start
        self._size = size
        self._at = 0
        self._values = 0
        self._alignment = 32
        self._shapes: dict[str, list[int]] = {}

    def check(self, sizes: Mapping[int, tuple[int, int]]) -> None:
        """All of it; see `check_gguf_header`."""
        if (magic := self._take(len(_MAGIC))) != _MAGIC:
            raise ValueError(f"it starts with {magic!r}")
        version, tensors, pairs = self._numbers("IQQ")
        if version not in _VERSIONS:
            raise ValueError(f"its version is {version}")
        if max(tensors, pairs) > MOST_TENSORS:
            raise ValueError(f"it lists {tensors} tensors and {pairs} values, and at most {MOST_TENSORS} are read")
        for _ in range(pairs):
            self._pair()
        spans = [self._tensor(sizes) for _ in range(tensors)]
        end = self._at + -self._at % self._alignment
        for begin, length, name in sorted((end + offset, length, name) for offset, length, name in spans):
            if begin < end or begin + length > self._size:
                raise ValueError(f"the place of tensor {name!r} does not fit into {self._size} bytes")
            end = begin + length

    def _take(self, count: int) -> bytes:
        end = self._at + count
        if end > len(self._start):
            whole = len(self._start) == self._size
            raise ValueError("the file ends in it" if whole else f"it has more than {LARGEST_HEADER} bytes")
        taken, self._at = self._start[self._at : end], end
        return taken

    def _numbers(self, kinds: str) -> list[int]:
        return list(struct.unpack(f"<{kinds}", self._take(struct.calcsize(f"<{kinds}"))))

    def _key(self) -> str:
        (length,) = self._numbers("Q")
        if length > LONGEST_KEY:
            raise ValueError(f"a name has {length} bytes, and at most {LONGEST_KEY} are read")
        return self._take(length).decode()

    def _pair(self) -> None:
        key, (kind,) = self._key(), self._numbers("I")
        if key == _ALIGNMENT:
            (self._alignment,) = self._numbers("I")
            if kind != 4 or self._alignment.bit_count() != 1:
                raise ValueError(f"its alignment is {self._alignment}")
        elif key.startswith(_SHAPE):
            inner, length = self._numbers("IQ")
            if kind != _ARRAY or inner != 5 or length > _MOST_DIMS:
                raise ValueError(f"{key!r} is no shape")
            self._shapes[key.removeprefix(_SHAPE)] = self._numbers(f"{length}i")
        else:
            self._skip(kind, 0)

    def _skip(self, kind: int, depth: int) -> None:
        if kind in _SCALARS:
            self._take(struct.calcsize(f"<{_SCALARS[kind]}"))
        elif kind == _STRING:
            self._take(*self._numbers("Q"))
        elif kind == _ARRAY and depth < _DEEPEST:
            inner, length = self._numbers("IQ")
            self._values += length
            if self._values > _MOST_VALUES:
                raise ValueError(f"its arrays have more than {_MOST_VALUES} values")
            for _ in range(length):
                self._skip(inner, depth + 1)
        else:
            raise ValueError(f"a value has the type {kind}" if kind != _ARRAY else "its arrays are too deep")

    def _tensor(self, sizes: Mapping[int, tuple[int, int]]) -> tuple[int, int, str]:
        """Offset and length in bytes, and the name."""
        name, (dims,) = self._key(), self._numbers("I")
        if dims > _MOST_DIMS:
            raise ValueError(f"tensor {name!r} has {dims} dimensions")
        *shape, kind, offset = self._numbers(f"{dims}QIQ")
        if kind not in sizes:
            raise ValueError(f"tensor {name!r} has numbers of an unknown type, {kind}")
        block, block_bytes = sizes[kind]
        numbers = math.prod(shape)
        if not numbers or (shape[0] if shape else 1) % block:
            raise ValueError(f"the shape of tensor {name!r} is {shape}")
        original = self._shapes.get(name, shape)
        if min(original, default=1) < 1 or math.prod(original) != numbers:
            raise ValueError(f"the shape of tensor {name!r} is {shape}, and was {original}")
        return offset, numbers // block * block_bytes, name
