"""Memory that the GPUs of one host share: each can write where another reads (PyTorch's symmetric memory)."""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
import torch.distributed as dist

log = logging.getLogger(__name__)

_LEAST = 64 << 20
"""Bytes of a buffer at least."""


@dataclass(frozen=True)
class PeerBuffers:
    """This rank's buffers for one shape of attention, and where those of the others are.

    Shapes are told in tensors, because numbers and shapes would become constants of a compiled graph: every size of
    picture would then need a graph of its own.

    Args:
        memory: (bytes,) uint8, shared: `landing` (tokens of all ranks, batch, 3, heads / ranks, head dim), where the
            others put query, key and value, then `returned` for attended values, of own tokens x batch x all heads.
        shape: int64 on the CPU: the byte at which `returned` begins, and the tokens of each rank.
        table: int64 on the GPU: address of every rank's landing, of every rank's returned, and the first token of
            every rank with the number of all tokens at the end.
        group: name of the process group.
    """

    memory: torch.Tensor
    shape: torch.Tensor
    table: torch.Tensor
    group: str


class PeerMemory:
    """Memory that the ranks of one group share, for attention of any shape; grown where a shape needs more.

    Every method is collective over the group. Buffers of earlier shapes stay valid while somebody holds them.

    Args:
        group: an NCCL group of this host's GPUs.
    """

    def __init__(self, group: dist.ProcessGroup, device: torch.device):
        self._group = group
        self._device = device
        self._memory: torch.Tensor | None = None
        self._pointers: Sequence[int] = ()

    @property
    def size(self) -> int:
        """Bytes that are shared now."""
        return 0 if self._memory is None else self._memory.numel()

    def buffers(
        self, lengths: tuple[int, ...], batch: int, heads: int, head_dim: int, dtype: torch.dtype
    ) -> PeerBuffers | None:
        """Return buffers for ranks of these lengths, None where a GPU cannot reach the memory of another.

        Args:
            heads: a multiple of the ranks.
        """
        landing = (sum(lengths), batch, 3, heads // len(lengths), head_dim)
        returned = (max(lengths), batch, heads, head_dim)
        sizes = [math.prod(shape) * dtype.itemsize for shape in (landing, returned)]
        if not self._reserve(-(-sizes[0] // 512) * 512 + sizes[1]):
            return None
        assert self._memory is not None
        # At the end: an attention over fewer of the tokens, in the same forward, then lands clear of what it returns.
        offset = (self._memory.numel() - sizes[1]) // 512 * 512
        table = [pointer + start for start in (0, offset) for pointer in self._pointers]
        table += accumulate(lengths, initial=0)
        return PeerBuffers(
            self._memory,
            torch.tensor([offset, *lengths], dtype=torch.int64),
            torch.tensor(table, dtype=torch.int64, device=self._device),
            self._group.group_name,
        )

    def _reserve(self, size: int) -> bool:
        """Make sure of `size` bytes on every rank; ranks have asked for the same sizes before, so they agree."""
        if self._memory is not None and self._memory.numel() >= size:
            return True
        import torch.distributed._symmetric_memory as symmetric_memory

        size = max(_LEAST, 1 << (size - 1).bit_length())  # seldom another one: a new size is a new graph
        try:
            memory = symmetric_memory.empty(size, dtype=torch.uint8, device=self._device)
            self._pointers = symmetric_memory.rendezvous(memory, self._group.group_name).buffer_ptrs
        except RuntimeError as error:
            log.warning(
                "Heads are exchanged with NCCL, as the GPUs cannot share memory: %s", str(error).splitlines()[0]
            )
            memory = None
        # A rank that cannot must not be waited for by those that can.
        vote = torch.tensor(int(memory is not None), device=self._device)
        dist.all_reduce(vote, op=dist.ReduceOp.MIN, group=self._group)
        self._memory = memory if vote.item() else None
        return self._memory is not None


def peers_are_near(group: dist.ProcessGroup | None) -> bool:
    """Whether writing to each other's memory is worth a try: GPUs of one host, peer access not forbidden."""
    if group is None or os.environ.get("NCCL_P2P_DISABLE", "0") != "0" or torch.cuda.device_count() < group.size():
        return False
    return os.environ.get("LOCAL_WORLD_SIZE") == os.environ.get("WORLD_SIZE")
