"""Peer memory for the forwards of one transformer: one buffer per group, seen in the shapes that were asked for."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from ..attention.peer_memory import PeerBuffers, PeerMemory, peers_are_near
from ..mesh import Mesh


@dataclass
class PeerSharing:
    """Which attention runs over peer memory, and its buffers.

    Args:
        heads, head_dim, dtype, device: of the transformer's self-attention on this rank.
        kernel: key of KERNELS.
    """

    heads: int
    head_dim: int
    dtype: torch.dtype
    device: torch.device
    kernel: str
    _memory: dict[str, PeerMemory | None] = field(default_factory=dict)
    _buffers: dict[tuple[str, tuple[int, ...], int], PeerBuffers] = field(default_factory=dict)

    def fits(self, query: torch.Tensor) -> bool:
        """Whether the buffers are for attention of this kind, (batch, tokens, heads, head dim)."""
        return query.shape[2:] == (self.heads, self.head_dim) and query.dtype == self.dtype

    def forget(self) -> None:
        """Let the memory go; it is made anew when it is asked for. Every rank of the groups does it alike."""
        self._memory.clear()
        self._buffers.clear()

    def buffers(self, mesh: Mesh, lengths: tuple[int, ...], batch: int) -> PeerBuffers | None:
        """Return buffers for ranks of these lengths, None where the ranks share no memory. Collective over the group.

        Everything here follows from the arguments, which the ranks have alike, so they stay together.
        """
        group = mesh.sequence
        if group is None or self.device.type != "cuda":
            return None
        name = group.group_name
        if name not in self._memory:
            self._memory[name] = PeerMemory(group, self.device) if peers_are_near(group) else None
        memory = self._memory[name]
        key = (name, lengths, batch)
        if memory is None or key in self._buffers:
            return self._buffers.get(key)
        heads = -(-self.heads // len(lengths)) * len(lengths)
        size = memory.size
        made = memory.buffers(lengths, batch, heads, self.head_dim, self.dtype)
        if memory.size != size:  # grown: let the old memory go, but for what a recording still holds
            self._buffers = {other: kept for other, kept in self._buffers.items() if other[0] != name}
        if made is None:
            self._memory[name] = None
            return None
        self._buffers[key] = made
        return made
