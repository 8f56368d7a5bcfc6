"""Memory that the GPUs of one host share: each can write where another reads (PyTorch's symmetric memory)."""

from __future__ import annotations

import logging
import math
from collections import OrderedDict
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
import torch.distributed as dist

from ..mesh.agreement import all_agree

log = logging.getLogger(__name__)

_LEAST = 64 << 20
"""Bytes of a buffer at least."""
_KEPT = 64
"""Kept buffers, one for each shape of attention; they all lie in the same memory."""


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

    One for each group, whatever models and plans use it: so it depends on nothing but the forwards over that group,
    which its ranks run alike, and on their votes.

    Args:
        group: of the ranks.
    """

    def __init__(self, group: dist.ProcessGroup):
        self._group = group
        self._memory: torch.Tensor | None = None
        self._pointers: Sequence[int] = ()
        self._too_large: float = math.inf
        self._buffers: OrderedDict[Hashable, PeerBuffers] = OrderedDict()
        self._made = 0

    @property
    def made(self) -> int:
        """How often memory was shared, a larger one or again; the same on all ranks."""
        return self._made

    @property
    def size(self) -> int:
        """Bytes that are shared now."""
        return 0 if self._memory is None else self._memory.numel()

    def free(self) -> None:
        """Let the memory go; it is made anew when it is asked for. Every rank of the group does so between the same
        forwards. Buffers stay valid while somebody holds them."""
        self._memory, self._pointers, self._too_large = None, (), math.inf
        self._buffers.clear()

    def buffers(
        self,
        lengths: tuple[int, ...],
        batch: int,
        heads: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> PeerBuffers | None:
        """Return buffers for ranks of these lengths, None where the ranks cannot share so much. Collective over the
        group.

        Args:
            heads: a multiple of the ranks.
            device: this rank's GPU.
        """
        key = (lengths, batch, heads, head_dim, dtype)
        if key not in self._buffers:
            landing = (sum(lengths), batch, 3, heads // len(lengths), head_dim)
            returned = (max(lengths), batch, heads, head_dim)
            sizes = [math.prod(shape) * dtype.itemsize for shape in (landing, returned)]
            if not self._reserve(-(-sizes[0] // 512) * 512 + sizes[1], device):
                return None
            self._buffers[key] = self._lay_out(lengths, sizes[1], device)
            while len(self._buffers) > _KEPT:
                self._buffers.popitem(last=False)
        self._buffers.move_to_end(key)
        return self._buffers[key]

    def _lay_out(self, lengths: tuple[int, ...], returned: int, device: torch.device) -> PeerBuffers:
        assert self._memory is not None
        # At the end: an attention over fewer of the tokens, in the same forward, then lands clear of what it returns.
        offset = (self._memory.numel() - returned) // 512 * 512
        table = [pointer + start for start in (0, offset) for pointer in self._pointers]
        table += accumulate(lengths, initial=0)
        return PeerBuffers(
            self._memory,
            torch.tensor([offset, *lengths], dtype=torch.int64),
            torch.tensor(table, dtype=torch.int64, device=device),
            self._group.group_name,
        )

    def _reserve(self, wanted: int, device: torch.device) -> bool:
        """Make sure of so many bytes on every rank. What is here, and what was too large, all ranks have alike."""
        if wanted <= self.size:
            return True
        size = max(_LEAST, 1 << (wanted - 1).bit_length())  # seldom another one: a new size is a new graph
        if size >= self._too_large:
            return False
        memory, refusal = _allocate(size, device)
        # A rank that has no memory says so before the others wait for it in `rendezvous`.
        if all_agree(memory is not None, self._group, device):
            assert memory is not None
            pointers, refusal = _exchange(memory, self._group)
            if all_agree(bool(pointers), self._group, device):
                self._memory, self._pointers = memory, pointers
                self._made += 1
                self._buffers.clear()  # the old memory goes, but for what a recording still holds
                return True
        self._too_large = size
        log.warning("Heads are exchanged with NCCL, as the GPUs share no memory: %s", refusal or "another rank cannot")
        return False


def _allocate(size: int, device: torch.device) -> tuple[torch.Tensor | None, str]:
    """Memory of this rank that can be shared, or why there is none."""
    try:
        import torch.distributed._symmetric_memory as symmetric_memory

        return symmetric_memory.empty(size, dtype=torch.uint8, device=device), ""
    except Exception as error:  # noqa: BLE001 - a private part of torch, behind which are collectives
        return None, _first_line(error)


def _exchange(memory: torch.Tensor, group: dist.ProcessGroup) -> tuple[Sequence[int], str]:
    """Addresses of all ranks' memory, or why there are none. Every rank of the group waits for the others."""
    try:
        import torch.distributed._symmetric_memory as symmetric_memory

        return symmetric_memory.rendezvous(memory, group.group_name).buffer_ptrs, ""
    except Exception as error:  # noqa: BLE001 - a private part of torch, behind which are collectives
        return (), _first_line(error)


def _first_line(error: Exception) -> str:
    return next(iter(str(error).splitlines()), type(error).__name__)
