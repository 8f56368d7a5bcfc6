"""The memory of one model's weights on a device: one region in which every tensor has its place, given back as one."""

from __future__ import annotations

import logging
from collections.abc import Hashable, Mapping
from typing import TypeVar

import torch

from .cuda_driver import DriverError
from .virtual_memory import VirtualRegion

log = logging.getLogger(__name__)

Name = TypeVar("Name", bound=Hashable)

ALIGNMENT = 512
"""Bytes; as PyTorch's allocator aligns, so that kernels for well aligned operands stay in use."""


def aligned(size: int) -> int:
    """Bytes, rounded up: a tensor or a piece that begins there begins with a whole number."""
    return -(-size // ALIGNMENT) * ALIGNMENT


def lay_out(sizes: Mapping[Name, int]) -> tuple[dict[Name, int], int]:
    """Places in a region for tensors of so many bytes, in their order: name -> first byte, and bytes of the region."""
    starts: dict[Name, int] = {}
    end = 0
    for name, size in sizes.items():
        starts[name] = aligned(end)
        end = starts[name] + size
    return starts, end


class PlainArena:
    """An arena of PyTorch's allocator, whose storage shrinks to nothing and grows again. Made with memory."""

    keeps_addresses = False

    def __init__(self, size: int, device: torch.device):
        self._size = size
        self.memory = torch.empty(size, dtype=torch.uint8, device=device)

    def take(self) -> None:
        storage = self.memory.untyped_storage()
        if not storage.nbytes():
            storage.resize_(self._size)

    def give_back(self) -> None:
        self.memory.untyped_storage().resize_(0)
        if self.memory.is_cuda:
            torch.cuda.empty_cache()


Arena = VirtualRegion | PlainArena
"""Memory that goes and comes back under the tensors that lie in it."""


def make_arena(size: int, device: torch.device) -> Arena:
    """An arena with memory: of virtual memory where the device has it.

    Raises:
        torch.OutOfMemoryError: there is not enough.
    """
    if device.type == "cuda" and torch.version.hip is None:
        try:
            region = VirtualRegion(size, device)
            region.take()
            return region
        except DriverError as error:
            log.warning("Recordings will go when weights go, as memory cannot be had at fixed addresses: %s", error)
    return PlainArena(size, device)


def place_tensor(arena: Arena, start: int, like: torch.Tensor) -> torch.Tensor:
    """A dense tensor of another's shape and type over the arena's bytes from `start` on."""
    own = arena.memory[start : start + like.nbytes]
    return own.view(like.dtype).as_strided(like.shape, torch.empty_like(like, device="meta").stride())
