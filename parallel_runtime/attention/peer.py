"""Ulysses over peer memory: on GPUs of one host that can write to each other's memory, the exchange is those writes.

One kernel reads query, key and value where they are and writes each head to the rank that attends with it, in the
place where attention reads it; a second one writes the attended values back, in the place where they belong. NCCL
copies into send buffers, through its channels and out again: for FLUX.1 on two H200s a block's exchange takes 190 us
with NCCL (docs/performance.md).

PyTorch's symmetric memory maps the peers' buffers and has the barrier. The two barriers of an attention also keep the
buffers apart from call to call: a rank writes to a peer's `landing` only after the peer came to the second barrier, so
after its attention has read the call before; and to its `returned` only after the next first barrier.
"""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F

from .kernels import KERNELS

log = logging.getLogger(__name__)

_WORD = torch.int64
"""Rows are moved as words of 8 bytes, whatever the dtype."""
_LEAST = 64 << 20
"""Bytes of a buffer at least."""


@dataclass(frozen=True)
class PeerBuffers:
    """This rank's buffers for one shape of attention, and where those of the others are.

    Shapes are told in tensors, because numbers and shapes would become constants of a compiled graph: every size of
    picture would then need a graph of its own.

    Args:
        memory: (bytes,) uint8, shared: `landing` (tokens of all ranks, batch, 3, heads / ranks, head dim), where the
            others put query, key and value, then `returned` (own tokens, batch, heads, head dim) for attended values.
        shape: int64 on the CPU: tokens of all ranks, and the byte at which `returned` begins.
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
            torch.tensor([sum(lengths), offset], dtype=torch.int64),
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


def peer_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    kernel: str,
    degree: int,
    buffers: PeerBuffers,
    scale: float | None = None,
) -> torch.Tensor:
    """Attend over the tokens of all ranks; as `ulysses_attention`, for any lengths. Collective over the group.

    Args:
        kernel: key of KERNELS.
        buffers: for these shapes, heads rounded up to a multiple of `degree`.
    """
    heads = query.shape[2]
    if heads % degree:
        query, key, value = (F.pad(part, (0, 0, 0, -heads % degree)) for part in (query, key, value))
    attended = _peer_attention(
        query, key, value, buffers.memory, buffers.shape, buffers.table, buffers.group, kernel, scale
    )
    return attended.narrow(2, 0, heads) if heads % degree else attended


@torch.library.custom_op("parallel_dit::peer_attention", mutates_args=())
def _peer_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    memory: torch.Tensor,
    shape: torch.Tensor,
    table: torch.Tensor,
    group: str,
    kernel: str,
    scale: float | None,
) -> torch.Tensor:
    """One operator from projections to attended values. It writes to `memory`, which is not declared as changed:
    nothing else reads it, and torch.compile would copy it."""
    import torch.distributed._symmetric_memory as symmetric_memory

    from .peer_kernels import push_heads, push_tokens

    ranks: Any = symmetric_memory.rendezvous(memory, group)  # type: ignore[arg-type] # a str, before torch 2.13 too
    batch, own, heads, head_dim = query.shape
    tokens, offset = shape.tolist()
    landing = _view(memory, 0, (tokens, batch, 3, heads // ranks.world_size, head_dim), query.dtype)
    returned = _view(memory, offset, (own, batch, heads, head_dim), query.dtype)
    push_heads([_words(part) for part in (query, key, value)], table, ranks.rank, ranks.world_size)
    ranks.barrier(channel=0)
    whole_query, whole_key, whole_value = (part.transpose(0, 1) for part in landing.unbind(2))
    attended = KERNELS[kernel].attend(whole_query, whole_key, whole_value, None, scale)
    push_tokens(_words(attended), table, ranks.rank, ranks.world_size)
    ranks.barrier(channel=0)
    return returned.transpose(0, 1).clone(memory_format=torch.contiguous_format)


@_peer_attention.register_fake
def _(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    memory: torch.Tensor,
    shape: torch.Tensor,
    table: torch.Tensor,
    group: str,
    kernel: str,
    scale: float | None,
) -> torch.Tensor:
    return query.new_empty(query.shape)


def _view(memory: torch.Tensor, start: int, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    return memory[start : start + math.prod(shape) * dtype.itemsize].view(dtype).view(shape)


def _words(part: torch.Tensor) -> torch.Tensor:
    """(batch, tokens, heads, head dim) -> (batch, tokens, words): a token's heads lie side by side."""
    if part.stride(3) != 1 or part.stride(2) != part.shape[3]:
        part = part.contiguous()
    return part.flatten(2).view(_WORD)
