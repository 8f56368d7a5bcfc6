"""Peer memory for the forwards of one transformer: the group's, seen in the shapes of its attention."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ..mesh.mesh import Mesh
from .peer_memory import PeerBuffers


@dataclass(frozen=True)
class PeerSharing:
    """Which attention runs over peer memory.

    Args:
        heads, head_dim, dtype, device: of the transformer's self-attention on this rank.
        kernel: key of KERNELS.
    """

    heads: int
    head_dim: int
    dtype: torch.dtype
    device: torch.device
    kernel: str

    def fits(self, query: torch.Tensor) -> bool:
        """Whether the buffers are for attention of this kind, (batch, tokens, heads, head dim)."""
        return query.shape[2:] == (self.heads, self.head_dim) and query.dtype == self.dtype

    def buffers(self, mesh: Mesh, lengths: tuple[int, ...], batch: int) -> PeerBuffers | None:
        """Return buffers for ranks of these lengths, None where they share no memory. Collective over the group."""
        if mesh.peers is None:
            return None
        heads = -(-self.heads // len(lengths)) * len(lengths)
        return mesh.peers.buffers(lengths, batch, heads, self.head_dim, self.dtype, self.device)
