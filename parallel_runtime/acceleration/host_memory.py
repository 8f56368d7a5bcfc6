"""Memory of the host that the ranks of one group have mapped, for exchanges between GPUs without peer access."""

from __future__ import annotations

import logging
import math
from collections import OrderedDict
from collections.abc import Callable, Hashable

import torch
import torch.distributed as dist

from ..mesh.agreement import all_agree
from ..streaming.share_memory import HostShare, open_share, room_on_host
from .host_exchange import HostBuffers
from .host_lanes import Opened, Slots, StreamMemory

log = logging.getLogger(__name__)

_CHUNKS, _PIECES = 4, 4
"""In how many chunks a rank's heads travel: attention over a few heads still fills a GPU, and what is not hidden is a
chunk's way there and back. In how many pieces a chunk does: of it, that way is a piece longer than the copy."""
_LEAST_MESSAGE = 4 << 20
"""Bytes of a chunk, or a piece, at least: more of them launch too slowly where nothing is replayed (FLUX.1, 1024², two
H100s: 4.5 ms an attention with pieces of 1.3 MB, 2.1 with 5.3; replayed 1.11 and 1.05)."""
_LEAST = 64 << 20
"""Bytes of the memory at least."""
_KEPT = 64
"""Kept buffers, one for each shape of attention."""


Open = Callable[[HostShare, int, int, torch.device], Opened]
"""(share, rank, ranks, device) -> the memory as this rank reaches it."""


class HostMemory:
    """Memory that the ranks of one group share on the host, for attention of any shape; grown where a shape needs more.

    Like PeerMemory it depends on nothing but the forwards over that group and its ranks' votes. Recordings and buffers
    hold it: what has grown goes when the last of them is gone.

    Args:
        group: of ranks of one host.
        chunks, pieces: at most.
        opened: how a rank reaches the memory; a test's ranks have no GPU.
    """

    def __init__(
        self, group: dist.ProcessGroup, chunks: int = _CHUNKS, pieces: int = _PIECES, opened: Open = StreamMemory
    ):
        self._group = group
        self._chunks, self._pieces = chunks, pieces
        self._opened = opened
        self._memory: Opened | None = None
        self._too_large: float = math.inf
        self._buffers: OrderedDict[Hashable, HostBuffers] = OrderedDict()
        self._made = 0

    @property
    def made(self) -> int:
        """How often memory was shared, a larger one or again; the same on all ranks."""
        return self._made

    @property
    def size(self) -> int:
        """Bytes that are shared now."""
        return 0 if self._memory is None else self._memory.slots.size

    def free(self) -> None:
        """Let the memory go; it is made anew when it is asked for. Every rank of the group does so between the same
        forwards."""
        self._memory, self._too_large = None, math.inf
        self._buffers.clear()

    def buffers(
        self,
        lengths: tuple[int, ...],
        batch: int,
        heads: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> HostBuffers | None:
        """Return buffers for ranks of these lengths, None where the ranks cannot share so much. Collective over the
        group.

        Args:
            heads: a multiple of the ranks.
            device: this rank's GPU.
        """
        key = (lengths, batch, heads, head_dim, dtype)
        if key not in self._buffers:
            degree, longest = len(lengths), max(lengths)
            head = 3 * batch * head_dim * dtype.itemsize  # bytes of a token
            chunks = _cut(heads // degree, self._chunks, longest * head)
            pieces = max(1, min(self._pieces, longest * head * max(chunks) // _LEAST_MESSAGE, longest))
            if not self._reserve(Slots.needed(degree, -(-longest // pieces) * head * max(chunks)), device):
                return None
            assert self._memory is not None
            self._buffers[key] = HostBuffers(self._memory, dist.get_rank(self._group), lengths, chunks, pieces)
            while len(self._buffers) > _KEPT:
                self._buffers.popitem(last=False)
        self._buffers.move_to_end(key)
        return self._buffers[key]

    def _reserve(self, wanted: int, device: torch.device) -> bool:
        """Make sure of so many bytes. What is here, and what was too large, all ranks have alike."""
        if wanted <= self.size:
            return True
        size = max(_LEAST, 1 << (wanted - 1).bit_length())  # seldom another one: a new memory is a new recording
        if size >= self._too_large:
            return False
        memory, refusal = self._share(size, device)
        if memory is None:
            self._too_large = size
            log.warning(
                "Heads are exchanged with NCCL, as the GPUs share no memory of the host: %s",
                refusal or "another rank cannot",
            )
            return False
        self._memory = memory
        self._made += 1
        self._buffers.clear()
        return True

    def _share(self, size: int, device: torch.device) -> tuple[Opened | None, str]:
        """New memory on all ranks, or on none and why: the first rank makes it and tells the others where it is."""
        share, refusal = _make(size) if dist.get_rank(self._group) == 0 else (None, "")
        if not all_agree(not refusal, self._group, device):
            return None, refusal
        where = torch.tensor(_place(share), dtype=torch.int64, device=device)
        dist.broadcast(where, src=dist.get_global_rank(self._group, 0), group=self._group)
        memory = None
        try:
            share = share or _open(where.tolist(), size, device)
            memory = self._opened(share, dist.get_rank(self._group), self._group.size(), device)
        except (OSError, RuntimeError) as error:
            refusal = next(iter(str(error).splitlines()), type(error).__name__)
            if share is not None:
                share.close()
        if not all_agree(memory is not None, self._group, device):
            return None, refusal
        return memory, ""


def _make(size: int) -> tuple[HostShare | None, str]:
    """Memory for all ranks, or why there is none."""
    if room_on_host() < size:
        return None, f"{size >> 20} MiB of the host's memory are not free"
    try:
        return HostShare(size), ""
    except OSError as error:
        return None, str(error)


def _place(share: HostShare | None) -> list[int]:
    """Process and descriptor by which others find it; of another rank, what the first one's will replace."""
    return [0, 0] if share is None else [int(part) for part in share.address.split(":")[1:3]]


def _open(where: list[int], size: int, device: torch.device) -> HostShare:
    share = open_share(f"host:{where[0]}:{where[1]}:{size}", device)
    assert isinstance(share, HostShare)
    return share


def _cut(heads: int, chunks: int, head_bytes: int) -> tuple[int, ...]:
    """Heads of each chunk, the larger ones first.

    Args:
        head_bytes: of one head's queries, keys and values.
    """
    count = max(1, min(heads, chunks, heads * head_bytes // _LEAST_MESSAGE))
    return tuple(heads // count + (index < heads % count) for index in range(count))
