"""Weights that ComfyUI's loader gives to a network and that stay in their file until they go to the device, once.

By itself the loader has memory for all of them, copies them there out of the mapped file, and they are copied to the
device from memory that is not pinned.
"""

from __future__ import annotations

import math
import mmap
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from ..errors import CheckpointError
from .header import DTYPES, read_header
from .reading import Place

_TICK_SECONDS = 0.1


class LeftInFile(TorchFunctionMode):
    """Inside, numbers of the file that are copied to a weight on the meta device stay where they are, and it is noted
    whose they are. What the loader converts, it converts as ever. `tick` is called ten times a second while functions
    of torch are called; it may raise to give up."""

    def __init__(self, file: MappedFile, tick: Callable[[], None] = lambda: None):
        super().__init__()
        self.file = file
        self._tick = tick
        self._ticked = time.monotonic()
        self.sources: dict[torch.Tensor, torch.Tensor] = {}
        """Of each weight, by identity, as tensors hash: its numbers, in the file where that has them."""

    def __torch_function__(self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Called for each function of torch."""
        if time.monotonic() - self._ticked > _TICK_SECONDS:
            self._tick()
            self._ticked = time.monotonic()
        if func is torch.Tensor.copy_ and args[0].is_meta:
            self.sources[args[0]] = args[1].detach()
            return args[0]
        return func(*args, **(kwargs or {}))

    def lacking(self, network: nn.Module) -> list[tuple[str, str]]:
        """(module, name) of tensors that have numbers nowhere: the file has none for them."""
        return [
            (path, name)
            for path, module in network.named_modules()
            for name, value in (*module._parameters.items(), *module._buffers.items(), *vars(module).items())
            if isinstance(value, torch.Tensor) and value.is_meta and value not in self.sources
        ]


_NORESERVE = 0x4000
"""Linux's MAP_NORESERVE, which Python has a name for since 3.11: a file may be larger than the memory."""


class MappedFile:
    """A safetensors file as tensors; it stays mapped while one of them is there. Who writes to one writes to a page of
    its own. Raises as `read_header`; CheckpointError, too, for numbers of a type that torch lacks."""

    def __init__(self, path: Path):
        self.path = path
        header = read_header(path)
        self.metadata = header.metadata
        with path.open("rb") as file:
            access = mmap.PROT_READ | mmap.PROT_WRITE
            mapped = mmap.mmap(file.fileno(), 0, flags=mmap.MAP_PRIVATE | _NORESERVE, prot=access)
        whole = torch.frombuffer(mapped, dtype=torch.uint8)
        self._begin, self._size = whole.data_ptr(), whole.numel()
        self.tensors: dict[str, torch.Tensor] = {}
        for name, info in header.tensors.items():
            if (dtype := DTYPES.get(info.dtype)) is None:
                what = "{path} has numbers of the type {dtype} ({name}), which torch {version} lacks."
                values = {"path": path, "dtype": info.dtype, "name": name, "version": torch.__version__}
                raise CheckpointError(what, "Update torch, or choose another file.", **values)
            count = math.prod(info.shape)
            flat = torch.empty(0, dtype=dtype)
            if count:
                flat = torch.frombuffer(mapped, dtype=dtype, count=count, offset=info.start)
            self.tensors[name] = flat.view(info.shape)

    def place(self, tensor: torch.Tensor) -> Place | None:
        """Where a tensor's numbers lie in the file, one after the other; None where they do not, or where somebody has
        written to them, as the loader does where it converts diffusers' layout."""
        if tensor.is_meta or tensor.device.type != "cpu" or not tensor.numel() or not tensor.is_contiguous():
            return None
        if tensor.is_inference() or tensor._version:
            return None
        start = tensor.data_ptr() - self._begin
        return Place(self.path, start, tensor.dtype) if 0 <= start < self._size else None
