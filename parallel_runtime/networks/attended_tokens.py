"""What one kind of attention reads of the forward at hand: how its tokens lie on the ranks, and on the wire."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any, TypeVar

import torch

from ..acceleration.peer_memory import PeerBuffers, PeerSharing
from ..attention.ring import RingLayout
from ..attention.ulysses import WireLayout
from ..mesh.mesh import Mesh

_KEPT = 32
"""Layouts on the device, of both kinds."""

_Layout = TypeVar("_Layout", WireLayout, RingLayout)


class AttendedTokens:
    """The tokens that a kind of attention goes over.

    `degree`, `wire`, `ring_layout` and `buffers` are what attention reads inside of compiled blocks: over how many
    ranks the tokens are split; how uneven shares lie on the wire of the Ulysses group, and how long the chunks of the
    ring are, None where all are equally long; the memory that the ranks share, where they share any. They follow from
    the forward's layout and the plan alone, so the ranks agree on them.

    Args:
        peers: None keeps the exchange on collectives.
    """

    def __init__(self, mesh: Mesh, peers: PeerSharing | None):
        self.peers = peers
        self._kept: OrderedDict[tuple[Any, ...], WireLayout | RingLayout] = OrderedDict()
        self.set_mesh(mesh)

    def set_mesh(self, mesh: Mesh) -> None:
        """Go over another mesh from the next forward on."""
        self._mesh = mesh
        self._index = mesh.sequence_index
        self.ulysses_group, self.ulysses = mesh.ulysses, mesh.plan.ulysses
        self.ring_group, self.ring, self.ring_index = mesh.ring, mesh.plan.ring, mesh.coordinate["ring"]
        self.start(mesh.plan.sequence)

    def start(self, degree: int) -> None:
        """A forward starts: nothing is known of its tokens."""
        self.degree = degree
        self.wire: WireLayout | None = None
        self.ring_layout: RingLayout | None = None
        self.buffers: PeerBuffers | None = None

    def split(self, lengths: tuple[int, ...], batch: int, device: torch.device) -> None:
        """Follow a forward in which every rank has that many tokens, at least one."""
        if self.peers is not None and self.ring == 1:
            self.buffers = self.peers.buffers(self._mesh, lengths, batch)
        groups = [lengths[first : first + self.ulysses] for first in range(0, self.degree, self.ulysses)]
        own = groups[self.ring_index]
        if len(set(own)) > 1:
            self.wire = self._build(WireLayout, own, self._index % self.ulysses, device)
        chunks = tuple(map(sum, groups))
        if len(set(chunks)) > 1:
            self.ring_layout = self._build(RingLayout, chunks, self.ring_index, device)

    def read(self) -> list[Any]:
        """What attention reads beside its arguments, in this forward."""
        return [self.wire, self.ring_layout, self.buffers]

    def forget(self) -> None:
        """Let go of what is on the device."""
        self.start(self._mesh.plan.sequence)
        self._kept.clear()

    def _build(self, kind: type[_Layout], lengths: tuple[int, ...], index: int, device: torch.device) -> _Layout:
        """Build a layout, or take one from before: a CUDA graph cannot be recorded while one comes from the CPU."""
        key = (kind, lengths, index, device)
        if key not in self._kept:
            self._kept[key] = kind.build(lengths, index, device)
            while len(self._kept) > _KEPT:
                self._kept.popitem(last=False)
        self._kept.move_to_end(key)
        layout = self._kept[key]
        assert isinstance(layout, kind)
        return layout
