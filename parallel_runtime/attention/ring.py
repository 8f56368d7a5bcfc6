"""Ring attention: queries stay, keys and values go round (arXiv 2310.01889, inference only).

Each rank attends with its queries to one chunk of the keys at a time, while that chunk is already on its way to the
next rank, and merges what it gets by the log-sum-exp, in float32. A hop is one message, K and V together, to one
neighbour: an all-to-all in which only one share is not empty, which NCCL and gloo send as one message. Ranks may hold
unlike numbers of tokens; every message has the length of its chunk, nothing is padded.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from .kernels import AttendWithLse

_COLLECTIVES = torch.ops._c10d_functional


class RingAttention:
    """Attention over the tokens of all ranks of a ring (`group`), of which this rank is `index`, by a kernel over one
    chunk of the keys; `lengths` are each rank's tokens, at least 1. Called as a kernel's `attend`. Collective over the
    group."""

    def __init__(self, kernel: AttendWithLse, group: dist.ProcessGroup, index: int, lengths: Sequence[int]):
        self._kernel, self._group = kernel, group
        self._index, self._lengths = index, lengths

    def __call__(
        self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None = None, scale: float | None = None
    ) -> Tensor:
        """Attend with this rank's queries to the keys of all ranks; arguments and result as of `ulysses_attention`."""
        chunk = torch.stack([key.transpose(0, 1), value.transpose(0, 1)], dim=1)  # (tokens, 2, batch, heads, dim)
        here = [chunk] if mask is None else [chunk, mask[:, 0, 0].transpose(0, 1).contiguous()]  # (tokens, batch or 1)
        merged: tuple[Tensor, Tensor] | None = None
        hops = len(self._lengths)
        for hop in range(hops):
            coming = [self._pass_on(each, hop) for each in here] if hop + 1 < hops else []
            part = self._kernel(query, key, value, mask, scale)
            merged = part if merged is None else merge(*merged, *part)
            if coming:
                here = [_COLLECTIVES.wait_tensor(each) for each in coming]
                key, value = (half.transpose(0, 1) for half in here[0].unbind(1))
                mask = None if mask is None else here[1].transpose(0, 1)[:, None, None]
        assert merged is not None
        return merged[0].to(query.dtype)

    def _pass_on(self, chunk: Tensor, hop: int) -> Tensor:
        """Begin to send a chunk, tokens outermost, to the next rank, and to receive one, which is to be waited for."""
        ranks = len(self._lengths)
        outgoing, incoming = [0] * ranks, [0] * ranks
        outgoing[(self._index + 1) % ranks] = chunk.shape[0]
        incoming[(self._index - 1) % ranks] = self._lengths[(self._index - 1 - hop) % ranks]
        return _COLLECTIVES.all_to_all_single(chunk, incoming, outgoing, self._group.group_name)


def merge(attended: Tensor, lse: Tensor, part: Tensor, part_lse: Tensor) -> tuple[Tensor, Tensor]:
    """Merge attention over two disjoint sets of keys: values, (batch, query tokens, heads, head dim), in float32 or
    wider, and the log-sum-exp, (batch, heads, query tokens), which is finite."""
    wide = torch.promote_types(attended.dtype, torch.float32)
    weight = torch.sigmoid(part_lse - lse).transpose(1, 2)[..., None].to(wide)
    return torch.lerp(attended.to(wide), part.to(wide), weight), torch.logaddexp(lse, part_lse)
