"""Memory of the host that the ranks of one group have mapped, for exchanges between GPUs without peer access."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from ..errors import first_line
from ..mesh.agreement import all_agree
from ..mesh.groups import ExchangedHeads
from ..streaming.share_memory import HostShare, open_host_share, room_on_host
from .grown_memory import GrownMemory
from .host_exchange import HostBuffers
from .host_lanes import Slots, StreamMemory

_CHUNKS, _PIECES = 4, 4
"""In how many chunks a rank's heads travel: attention over a few heads still fills a GPU, and what is not hidden is a
chunk's way there and back. In how many pieces a chunk does: of it, that way is a piece longer than the copy."""
_LEAST_MESSAGE = 4 << 20
"""Bytes of a chunk, or a piece, at least: more of them launch too slowly where nothing is replayed (FLUX.1, 1024², two
H100s: 4.5 ms an attention with pieces of 1.3 MB, 2.1 with 5.3; replayed 1.11 and 1.05)."""


class HostMemory(GrownMemory[StreamMemory, HostBuffers]):
    """One memory that every rank of a host has mapped. At most so many chunks and pieces; `opened` is how a rank
    reaches it."""

    where = "memory of the host"

    def __init__(
        self, group: dist.ProcessGroup, chunks: int = _CHUNKS, pieces: int = _PIECES, opened: Any = StreamMemory
    ):
        super().__init__(group)
        self._chunks, self._pieces, self._opened = chunks, pieces, opened

    def _needed(self, heads: ExchangedHeads) -> int:
        degree, (chunks, pieces) = len(heads.lengths), self._pieces_of(heads)
        return Slots.needed(degree, -(-max(heads.lengths) // pieces) * _token(heads) * max(chunks))

    def _lay_out(self, heads: ExchangedHeads, memory: StreamMemory) -> HostBuffers:
        return HostBuffers(memory, dist.get_rank(self._group), heads.lengths, *self._pieces_of(heads))

    def _pieces_of(self, heads: ExchangedHeads) -> tuple[tuple[int, ...], int]:
        """Heads of each chunk, and the pieces of a chunk."""
        longest, token = max(heads.lengths), _token(heads)
        chunks = _cut(heads.heads // len(heads.lengths), self._chunks, longest * token)
        return chunks, max(1, min(self._pieces, longest * token * max(chunks) // _LEAST_MESSAGE, longest))

    def _share(self, size: int, device: torch.device) -> tuple[StreamMemory | None, str]:
        # The first rank makes it and tells the others where it is.
        share, refusal = _make(size) if dist.get_rank(self._group) == 0 else (None, "")
        if not all_agree(not refusal, self._group, device):
            return None, refusal
        # Process and descriptor by which others find it.
        place = [0, 0] if share is None else [int(part) for part in share.address.split(":")[1:3]]
        where = torch.tensor(place, dtype=torch.int64, device=device)
        dist.broadcast(where, src=dist.get_global_rank(self._group, 0), group=self._group)
        memory = None
        try:
            share = share or open_host_share("host:{}:{}:{}".format(*where.tolist(), size))
            memory = self._opened(share, dist.get_rank(self._group), self._group.size(), device)
        except (OSError, RuntimeError) as error:
            refusal = first_line(error)
            if share is not None:
                share.close()
        if not all_agree(memory is not None, self._group, device):
            return None, refusal
        return memory, ""


def _token(heads: ExchangedHeads) -> int:
    """Bytes of a token's query, key and value of one head, in all items of the batch."""
    return 3 * heads.batch * heads.head_dim * heads.dtype.itemsize


def _make(size: int) -> tuple[HostShare | None, str]:
    """Memory for all ranks, or why there is none."""
    if room_on_host() < size:
        return None, f"{size >> 20} MiB of the host's memory are not free"
    try:
        return HostShare(size), ""
    except OSError as error:
        return None, str(error)


def _cut(heads: int, chunks: int, head_bytes: int) -> tuple[int, ...]:
    """Heads of each chunk, the larger ones first; `head_bytes` are those of one head's queries, keys and values."""
    count = max(1, min(heads, chunks, heads * head_bytes // _LEAST_MESSAGE))
    return tuple(heads // count + (index < heads % count) for index in range(count))
