"""Ring attention: queries stay, keys and values go round (arXiv 2310.01889, inference only).

Each rank attends with its queries to one chunk of the keys at a time, while that chunk is already on its way to the
next rank, and merges what it gets by the log-sum-exp, in float32. A hop is one message, K and V together, from each
rank to its neighbour alone: an all-to-all in which only one share is not empty, which NCCL and gloo send as one
message, and which torch.compile(fullgraph=True) traces as the point-to-point calls of torch.distributed it does not.
Ranks may hold unlike numbers of tokens; every message has the length of its chunk, nothing is padded.

The exchange is ours and not yunchang's (ring_pytorch_attn_func): that one is an autograd.Function around
batch_isend_irecv, at which torch.compile breaks the graph, sends K and V apart, and wants chunks of equal length.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist

from .kernels import AttendWithLse
from .operators import leave_open


@dataclass(frozen=True)
class RingLayout:
    """How long the chunks are when ranks hold unequal numbers of tokens.

    Shapes of tensors and not numbers, because numbers would become constants of a compiled graph: every size of
    picture would then need a graph of its own.

    Args:
        chunks: (tokens, 0) of the chunk that this rank attends to at each hop; its own at the first.
    """

    chunks: tuple[torch.Tensor, ...]

    @classmethod
    def build(cls, lengths: tuple[int, ...], index: int, device: torch.device) -> RingLayout:
        """Lay out ranks of these lengths, each at least 1, for rank `index`: no collective."""
        hops = (lengths[(index - hop) % len(lengths)] for hop in range(len(lengths)))
        chunks = tuple(torch.empty(length, 0, device=device) for length in hops)
        for chunk in chunks:
            leave_open(chunk, 0)
        return cls(chunks)


class RingAttention:
    """Attention over the tokens of all ranks of a ring; called as a kernel's `attend`. Collective over the group.

    No frozen dataclass: it is made inside of traced code, where torch 2.11 loses a frozen one's fields.

    Args:
        kernel: attention over a chunk of the keys.
        group: the ring, `degree` ranks, of which this one is `index`.
        layout: None when all ranks hold equally many tokens.
    """

    def __init__(
        self, kernel: AttendWithLse, group: dist.ProcessGroup, degree: int, index: int, layout: RingLayout | None = None
    ):
        self._kernel = kernel
        self._group = group
        self._degree = degree
        self._index = index
        self._layout = layout

    def __call__(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        mask: torch.Tensor | None = None,
        scale: float | None = None,
    ) -> torch.Tensor:
        """Attend with this rank's queries to the keys of all ranks.

        Args:
            query, key, value: this rank's tokens, (batch, local tokens, heads, head dim); heads alike on all ranks.
            mask: of this rank's own keys, (batch or 1, 1, 1, local tokens); on all ranks or on none.
            scale: of the logits, None for 1/sqrt(head dim).

        Returns:
            Attended values of this rank's tokens, shaped as the query.
        """
        chunk = torch.stack([key.transpose(0, 1), value.transpose(0, 1)], dim=1)  # (tokens, 2, batch, heads, dim)
        hidden = None if mask is None else mask[:, 0, 0].transpose(0, 1).contiguous()  # (tokens, batch or 1)
        merged: tuple[torch.Tensor, torch.Tensor] | None = None
        for hop in range(self._degree):
            last = hop + 1 == self._degree
            if not last:
                chunk = self._pass_on(chunk, hop)
                hidden = None if hidden is None else self._pass_on(hidden, hop)
            part = self._kernel(query, key, value, mask, scale)
            merged = part if merged is None else merge(*merged, *part)
            if not last:
                chunk = _wait(chunk)
                key, value = (half.transpose(0, 1) for half in chunk.unbind(1))
                hidden = None if hidden is None else _wait(hidden)
                mask = None if hidden is None else hidden.transpose(0, 1)[:, None, None]
        assert merged is not None
        return merged[0].to(query.dtype)

    def _pass_on(self, chunk: torch.Tensor, hop: int) -> torch.Tensor:
        """Begin to send a chunk, tokens outermost, to the next rank, and to receive one; `_wait` before it is read."""
        sent, received = chunk.shape[0], chunk.shape[0]
        if self._layout is not None:
            sent, received = self._layout.chunks[hop].shape[0], self._layout.chunks[hop + 1].shape[0]
        to, source = (self._index + 1) % self._degree, (self._index - 1) % self._degree
        outgoing = [sent if rank == to else 0 for rank in range(self._degree)]
        incoming = [received if rank == source else 0 for rank in range(self._degree)]
        return torch.ops._c10d_functional.all_to_all_single(chunk, incoming, outgoing, self._group.group_name)


def merge(
    attended: torch.Tensor, lse: torch.Tensor, part: torch.Tensor, part_lse: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Merge attention over two disjoint sets of keys.

    Args:
        attended, part: attended values, (batch, query tokens, heads, head dim).
        lse, part_lse: (batch, heads, query tokens), finite.

    Returns:
        Attended values, in float32 or wider, and log-sum-exp over both sets.
    """
    wide = torch.promote_types(attended.dtype, torch.float32)
    weight = torch.sigmoid(part_lse - lse).transpose(1, 2)[..., None].to(wide)
    return torch.lerp(attended.to(wide), part.to(wide), weight), torch.logaddexp(lse, part_lse)


def _wait(chunk: torch.Tensor) -> torch.Tensor:
    return torch.ops._c10d_functional.wait_tensor(chunk)
