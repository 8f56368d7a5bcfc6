"""Memory that the ranks of one group share for attention of any shape, whichever way they share it."""

from __future__ import annotations

import logging
import math
from abc import ABC, abstractmethod
from collections import OrderedDict
from typing import Generic, TypeVar

import torch
import torch.distributed as dist

from ..mesh.groups import ExchangedHeads

log = logging.getLogger(__name__)

_LEAST = 64 << 20
"""Bytes of the memory at least."""
_KEPT = 64
"""Kept buffers, one for each shape of attention; they all lie in the same memory."""

Memory = TypeVar("Memory")
Buffers = TypeVar("Buffers")


class GrownMemory(ABC, Generic[Memory, Buffers]):
    """Memory that the ranks of one group share; grown where a shape of attention needs more.

    One for each group, whatever models and plans use it: so it depends on nothing but the forwards over that group,
    which its ranks run alike, and on their votes. Recordings and buffers hold it: what has grown goes when the last of
    them is gone.
    """

    where: str
    """What is shared, for the log."""

    def __init__(self, group: dist.ProcessGroup):
        self._group = group
        self._memory: Memory | None = None
        self._size = 0
        self._too_large: float = math.inf
        self._buffers: OrderedDict[ExchangedHeads, Buffers] = OrderedDict()
        self.made = 0
        """How often memory was shared, a larger one or again; the same on all ranks."""

    def free(self) -> None:
        """Let the memory go; it is made anew when it is asked for. Every rank of the group does so between the same
        forwards. Buffers stay valid while somebody holds them."""
        self._memory, self._size, self._too_large = None, 0, math.inf
        self._buffers.clear()

    def buffers(self, heads: ExchangedHeads) -> Buffers | None:
        """Return buffers for such heads, None where the ranks cannot share so much. Collective over the group."""
        if heads not in self._buffers:
            if not self._reserve(self._needed(heads), heads.device):
                return None
            assert self._memory is not None
            self._buffers[heads] = self._lay_out(heads, self._memory)
            while len(self._buffers) > _KEPT:
                self._buffers.popitem(last=False)
        self._buffers.move_to_end(heads)
        return self._buffers[heads]

    @abstractmethod
    def _needed(self, heads: ExchangedHeads) -> int:
        """Bytes of memory."""

    @abstractmethod
    def _lay_out(self, heads: ExchangedHeads, memory: Memory) -> Buffers:
        """Buffers in memory that is large enough."""

    @abstractmethod
    def _share(self, size: int, device: torch.device) -> tuple[Memory | None, str]:
        """New memory on all ranks, or on none and why, "" where another rank knows."""

    def _reserve(self, wanted: int, device: torch.device) -> bool:
        """Make sure of so many bytes on every rank. What is here, and what was too large, all ranks have alike."""
        if wanted <= self._size:
            return True
        size = max(_LEAST, 1 << (wanted - 1).bit_length())  # seldom another one: a new memory is a new graph
        if size >= self._too_large:
            return False
        memory, refusal = self._share(size, device)
        if memory is None:
            self._too_large = size
            refusal = refusal or "another rank cannot"
            log.warning("Heads are exchanged with NCCL, as the GPUs share no %s: %s", self.where, refusal)
            return False
        self._memory, self._size = memory, size
        self.made += 1
        self._buffers.clear()  # the old memory goes, but for what a recording still holds
        return True
