"""Memory that the ranks of one group share for attention of any shape, grown where one needs more: each other's, where
the GPUs of one host can write to it (PyTorch's symmetric memory), or the host's, which all have mapped."""

from __future__ import annotations

import logging
import math
from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, Generic, TypeVar

import torch
import torch.distributed as dist

from ..errors import first_line
from ..mesh.agreement import all_agree
from ..streaming.share_memory import HostShare, open_host_share, room_on_host
from . import host_lanes
from .host_exchange import HostBuffers
from .host_lanes import Slots, StreamMemory

log = logging.getLogger(__name__)

_LEAST = 64 << 20  # bytes of the memory at least
_KEPT = 64  # kept buffers, one for each shape of attention; they all lie in the same memory

Memory = TypeVar("Memory")
Buffers = TypeVar("Buffers")


@dataclass(frozen=True)
class ExchangedHeads:
    """One attention's heads, a multiple of the ranks of a group, as these exchange them."""

    lengths: tuple[int, ...]  # tokens of each rank
    batch: int
    heads: int
    head_dim: int
    dtype: torch.dtype
    device: torch.device  # this rank's

    @property
    def token(self) -> int:
        """Bytes of one head of a token, in all items of the batch."""
        return self.batch * self.head_dim * self.dtype.itemsize


class GrownMemory(ABC, Generic[Memory, Buffers]):
    """One for each group, whatever models and plans use it: so it depends on nothing but the forwards over that group,
    which its ranks run alike, and on their votes. Recordings and buffers hold it: what has grown goes when the last of
    them is gone."""

    where: str  # what is shared, for the log

    def __init__(self, group: dist.ProcessGroup):
        self._group = group
        self._memory: Memory | None = None
        self._size = 0
        self._too_large: float = math.inf
        self._buffers: OrderedDict[ExchangedHeads, Buffers] = OrderedDict()
        self.made = 0  # how often memory was shared, a larger one or again; the same on all ranks

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


@dataclass(frozen=True)
class PeerBuffers:
    """This rank's buffers for one shape of attention, and where those of the others are. In `memory`, (bytes,) uint8,
    lie `landing` (tokens of all ranks, batch, 3, heads / ranks, head dim), where the others put query, key and value,
    and from byte `returned` on attended values, (ranks, own tokens, batch, heads / ranks, head dim). `table`, int64 on
    the GPU, has the address of every rank's landing, of every rank's returned, and the first token of every rank with
    the number of all tokens at the end."""

    memory: torch.Tensor
    returned: int
    lengths: tuple[int, ...]  # tokens of each rank
    table: torch.Tensor
    group: str  # its name
    by_stores: bool = True  # kernels write to the others' memory; else copy engines do


class PeerMemory(GrownMemory[tuple[torch.Tensor, Sequence[int]], PeerBuffers]):
    """Each rank's memory, and where on this GPU that of every rank is."""

    where = "memory"
    by_stores = True  # of the buffers that are laid out next

    def _needed(self, heads: ExchangedHeads) -> int:
        landing, returned = _sizes(heads)
        return -(-landing // 512) * 512 + returned

    def _lay_out(self, heads: ExchangedHeads, memory: tuple[torch.Tensor, Sequence[int]]) -> PeerBuffers:
        own, pointers = memory
        # At the end: an attention over fewer of the tokens, in the same forward, then lands clear of what it returns.
        offset = (own.numel() - _sizes(heads)[1]) // 512 * 512
        table = [pointer + start for start in (0, offset) for pointer in pointers]
        table += accumulate(heads.lengths, initial=0)
        addresses = torch.tensor(table, dtype=torch.int64, device=heads.device)
        return PeerBuffers(own, offset, heads.lengths, addresses, self._group.group_name, self.by_stores)

    def _share(self, size: int, device: torch.device) -> tuple[tuple[torch.Tensor, Sequence[int]] | None, str]:
        memory, refusal = _tried(lambda torchs: torchs.empty(size, dtype=torch.uint8, device=device))
        # A rank that has no memory says so before the others wait for it in `rendezvous`.
        if all_agree(memory is not None, self._group, device):
            group = self._group.group_name
            pointers, refusal = _tried(lambda torchs: torchs.rendezvous(memory, group).buffer_ptrs)
            if all_agree(bool(pointers), self._group, device):
                return (memory, pointers), ""
        return None, refusal


def _sizes(heads: ExchangedHeads) -> tuple[int, int]:
    """Bytes of `landing` and of `returned`."""
    landing = sum(heads.lengths) * 3 * (heads.heads // len(heads.lengths)) * heads.token
    return landing, max(heads.lengths) * heads.heads * heads.token


def _tried(ask: Callable[[Any], Any]) -> tuple[Any, str]:
    """What torch's symmetric memory gives; else None, and why."""
    try:
        import torch.distributed._symmetric_memory as symmetric_memory

        return ask(symmetric_memory), ""
    except Exception as error:  # noqa: BLE001 - a private part of torch, behind which are collectives
        return None, first_line(error)


class HostMemory(GrownMemory[StreamMemory, HostBuffers]):
    """One memory that every rank has mapped."""

    where = "memory of the host"
    chunks = pieces = 4
    """In how many chunks a rank's heads travel at most: attention over a few heads still fills a GPU, and what is not
    hidden is a chunk's way there and back. In how many pieces a chunk does: of it, that way is a piece longer than the
    copy."""

    def _needed(self, heads: ExchangedHeads) -> int:
        degree, (chunks, pieces) = len(heads.lengths), self._pieces_of(heads)
        return Slots.needed(degree, -(-max(heads.lengths) // pieces) * 3 * heads.token * max(chunks))

    def _lay_out(self, heads: ExchangedHeads, memory: StreamMemory) -> HostBuffers:
        return HostBuffers(memory, dist.get_rank(self._group), heads.lengths, *self._pieces_of(heads))

    def _pieces_of(self, heads: ExchangedHeads) -> tuple[tuple[int, ...], int]:
        """Heads of each chunk, and the pieces of a chunk."""
        longest = max(heads.lengths)
        head = longest * 3 * heads.token  # queries, keys and values
        chunks = _cut(heads.heads // len(heads.lengths), self.chunks, head)
        return chunks, max(1, min(self.pieces, head * max(chunks) // host_lanes.LEAST_MESSAGE, longest))

    def _share(self, size: int, device: torch.device) -> tuple[StreamMemory | None, str]:
        rank, share, refusal = dist.get_rank(self._group), None, ""
        if rank == 0 and room_on_host() < size:
            refusal = f"{size >> 20} MiB of the host's memory are not free"
        elif rank == 0:  # it makes the memory, and tells the others where it is
            try:
                share = HostShare(size)
            except OSError as error:
                refusal = str(error)
        if not all_agree(not refusal, self._group, device):
            return None, refusal
        # Process and descriptor by which others find it.
        place = [0, 0] if share is None else [int(part) for part in share.address.split(":")[1:3]]
        where = torch.tensor(place, dtype=torch.int64, device=device)
        dist.broadcast(where, src=dist.get_global_rank(self._group, 0), group=self._group)
        memory = None
        try:
            share = share or open_host_share("host:{}:{}:{}".format(*where.tolist(), size))
            memory = StreamMemory(share, rank, self._group.size(), device)
        except (OSError, RuntimeError) as error:
            refusal = first_line(error)
            if share is not None:
                share.close()
        return (memory, "") if all_agree(memory is not None, self._group, device) else (None, refusal)


def _cut(heads: int, chunks: int, head_bytes: int) -> tuple[int, ...]:
    """Heads of each chunk, the larger ones first; `head_bytes` are those of one head's queries, keys and values."""
    count = max(1, min(heads, chunks, heads * head_bytes // host_lanes.LEAST_MESSAGE))
    return tuple(heads // count + (index < heads % count) for index in range(count))
