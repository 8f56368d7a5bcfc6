"""Attention where the tokens are split over ranks: how they lie on the ranks and on the wire, and the way it goes."""

from __future__ import annotations

from functools import lru_cache, partial

import torch
from torch import Tensor

from ..attention.kernels import AttentionKernel
from ..attention.over_ranks import WireLayout, ring_attention, ulysses_attention
from ..errors import UnsupportedModelError
from ..exchange.grown_memory import PeerBuffers
from ..exchange.head_routes import HeadSharing
from ..exchange.host_exchange import HostBuffers, attend_through_host
from ..exchange.peer_exchange import peer_attention
from ..mesh.mesh import Mesh
from ..requests.facts import CPU, MachineFacts

_KEPT = 32  # layouts on the device
_FIX = "Set ulysses and ring to 1; the batch can still be split."


class AttendedTokens:
    """The tokens of all ranks, and attention over them: it follows from layout and plan alone, so ranks agree on it."""

    def __init__(self, mesh: Mesh):
        self.peers: HeadSharing | None = None  # None keeps the exchange on collectives
        self.machine: MachineFacts = CPU  # that the ranks are, alike on all
        self.gathers = False  # inputs go through the host's memory where they can, as all ranks do in this kind of call
        self.noted: list[str] = []  # of this forward's attentions through that memory, what inputs could; "" of none
        # Kept, as a CUDA graph cannot be recorded while one comes from the CPU.
        self._wire_layout = lru_cache(_KEPT)(WireLayout.build)
        self.set_mesh(mesh)

    def set_mesh(self, mesh: Mesh) -> None:
        """Go over another mesh from the next forward on."""
        self._mesh = mesh
        self.degree = mesh.plan.sequence  # over how many ranks they are split
        self.start()

    def start(self) -> None:
        """A forward starts: nothing is known of its tokens."""
        self.wire: WireLayout | None = None  # how uneven shares lie on the Ulysses group's wire; None: all equally long
        self.chunks: tuple[int, ...] = ()  # tokens of each chunk of the ring
        self.buffers: PeerBuffers | HostBuffers | None = None  # the memory that the ranks share, where they share any

    def split(self, lengths: tuple[int, ...], batch: int, device: torch.device) -> None:
        """Follow a forward in which every rank has that many tokens, at least one."""
        plan, place = self._mesh.plan, self._mesh.coordinate
        if self.peers is not None and plan.ring == 1:
            self.buffers = self.peers.buffers(self._mesh, lengths, batch)
        groups = [lengths[first : first + plan.ulysses] for first in range(0, self.degree, plan.ulysses)]
        own = groups[place["ring"]]
        if len(set(own)) > 1:
            self.wire = self._wire_layout(own, place["ulysses"], device)
        self.chunks = tuple(map(sum, groups))

    def forget(self) -> None:
        """Let go of what is on the device."""
        self.start()
        self._wire_layout.cache_clear()

    def attend(
        self, kernel: AttentionKernel, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float | None
    ) -> Tensor:
        """Attention of this rank's tokens over those of all ranks."""
        if self.degree == 1:
            return kernel.attend(q, k, v, mask, scale)
        if q.shape[:3] != k.shape[:3]:
            what = "The model attends to other tokens than its own, where the sequence is split."
            raise UnsupportedModelError(what, _FIX)
        if mask is not None:
            mask = _mask_of_keys(mask, k)
        elif self.buffers is not None and self.peers is not None and self.peers.fits(q.dtype, *q.shape[2:]):
            if isinstance(self.buffers, HostBuffers):
                self.noted.append("")
                return attend_through_host(q, k, v, kernel=kernel.attend, buffers=self.buffers, scale=scale)
            return peer_attention(q, k, v, kernel=kernel.attend, buffers=self.buffers, scale=scale)
        group, in_group = self._mesh.ulysses, kernel.attend
        if self._mesh.ring is not None:  # with its group's tokens it attends to those of all groups
            assert kernel.attend_with_lse is not None
            place = self._mesh.ring, self._mesh.coordinate["ring"], self.chunks
            in_group = partial(ring_attention, kernel.attend_with_lse, *place)
        if group is None:
            return in_group(q, k, v, mask, scale)
        return ulysses_attention(q, k, v, kernel=in_group, group=group, layout=self.wire, mask=mask, scale=scale)


def _mask_of_keys(mask: Tensor, key: Tensor) -> Tensor:
    """Return the mask of this rank's own keys as (batch or 1, 1, 1, local tokens), which other ranks can use."""
    whole = mask[(None,) * (4 - mask.dim())]
    if whole.shape[1:3] != (1, 1) or whole.shape[0] not in (1, key.shape[0]) or whole.shape[3] != key.shape[1]:
        what = (
            "The model attends with a mask of shape {shape} where the sequence is split, which is not a mask "
            "of the {shape2} keys of this worker alone."
        )
        raise UnsupportedModelError(what, _FIX, shape=tuple(mask.shape), shape2=key.shape[1])
    return whole
