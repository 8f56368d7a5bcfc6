"""A safetensors file mapped into memory, whose tensors are read when they are looked at; where each lies is known."""

from __future__ import annotations

import math
import mmap
from pathlib import Path

import torch

from .header import read_header
from .host_file import dtype_of

_NORESERVE = 0x4000
"""Linux's MAP_NORESERVE, which Python has a name for since 3.11: a file may be larger than the memory."""


class MappedFile:
    """See the module. Who writes to a tensor writes to a page of its own.

    Args:
        path: it stays mapped while one of its tensors is there.

    Raises:
        CheckpointError, UnsupportedModelError: see `read_header`.
    """

    def __init__(self, path: Path):
        self.path = path
        header = read_header(path)
        self.metadata = dict(header.metadata)
        with path.open("rb") as file:
            mapped = mmap.mmap(
                file.fileno(), 0, flags=mmap.MAP_PRIVATE | _NORESERVE, prot=mmap.PROT_READ | mmap.PROT_WRITE
            )
        whole = torch.frombuffer(mapped, dtype=torch.uint8)
        self._begin, self._size = whole.data_ptr(), whole.numel()
        self.tensors: dict[str, torch.Tensor] = {}
        for name, info in header.tensors.items():
            dtype, count = dtype_of(info.dtype), math.prod(info.shape)
            assert dtype is not None  # or the file would not have been opened
            flat = torch.empty(0, dtype=dtype)
            if count:
                flat = torch.frombuffer(mapped, dtype=dtype, count=count, offset=header.starts[name])
            self.tensors[name] = flat.view(info.shape)

    def start(self, tensor: torch.Tensor) -> int | None:
        """The byte of the file at which a tensor's numbers lie one after the other; None where they do not."""
        if tensor.is_meta or tensor.device.type != "cpu" or not tensor.numel() or not tensor.is_contiguous():
            return None
        start = tensor.data_ptr() - self._begin
        return start if 0 <= start < self._size else None
