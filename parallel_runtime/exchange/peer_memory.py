"""Memory that the GPUs of one host share: each can write where another reads (PyTorch's symmetric memory)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch

from ..errors import first_line
from ..mesh.agreement import all_agree
from ..mesh.groups import ExchangedHeads
from .grown_memory import GrownMemory


@dataclass(frozen=True)
class PeerBuffers:
    """This rank's buffers for one shape of attention, and where those of the others are.

    Args:
        memory: (bytes,) uint8, shared: `landing` (tokens of all ranks, batch, 3, heads / ranks, head dim), where the
            others put query, key and value, then, from byte `returned` on, attended values of own tokens x batch x all
            heads.
        lengths: tokens of each rank.
        table: int64 on the GPU: address of every rank's landing, of every rank's returned, and the first token of
            every rank with the number of all tokens at the end.
        group: name of the process group.
    """

    memory: torch.Tensor
    returned: int
    lengths: tuple[int, ...]
    table: torch.Tensor
    group: str


class PeerMemory(GrownMemory[tuple[torch.Tensor, Sequence[int]], PeerBuffers]):
    """Each rank's memory, and where on this GPU that of every rank is."""

    where = "memory"

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
        return PeerBuffers(own, offset, heads.lengths, addresses, self._group.group_name)

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
    width = heads.batch * heads.head_dim * heads.dtype.itemsize
    landing = sum(heads.lengths) * 3 * (heads.heads // len(heads.lengths)) * width
    return landing, max(heads.lengths) * heads.heads * width


def _tried(ask: Callable[[Any], Any]) -> tuple[Any, str]:
    """What torch's symmetric memory gives; else None, and why."""
    try:
        import torch.distributed._symmetric_memory as symmetric_memory

        return ask(symmetric_memory), ""
    except Exception as error:  # noqa: BLE001 - a private part of torch, behind which are collectives
        return None, first_line(error)
