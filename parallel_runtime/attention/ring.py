"""Ring attention: queries stay, keys and values go round (arXiv 2310.01889, inference only). Each rank attends to one
chunk of the keys while that is on its way to the next rank, and merges by the log-sum-exp, in float32. A hop is one
message, K and V together, of the chunk's length: an all-to-all in which only one share is not empty."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from .kernels import AttendWithLse

_COLLECTIVES = torch.ops._c10d_functional


def ring_attention(
    kernel: AttendWithLse, group: dist.ProcessGroup, index: int, lengths: Sequence[int],
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scale: float | None,
) -> Tensor:  # fmt: skip
    """Attend with this rank's queries to the keys of all ranks of a ring (`group`), of which this rank is `index`;
    `lengths` are each rank's tokens, at least 1. The rest is as of `ulysses_attention`. Collective over the group."""

    def pass_on(chunk: Tensor, hop: int) -> Tensor:
        """Begin to send a chunk, tokens outermost, to the next rank, and to receive one, which is to be waited for."""
        outgoing, incoming = [0] * hops, [0] * hops
        outgoing[(index + 1) % hops] = chunk.shape[0]
        incoming[index - 1] = lengths[(index - 1 - hop) % hops]
        return _COLLECTIVES.all_to_all_single(chunk, incoming, outgoing, group.group_name)

    hops = len(lengths)
    chunk = torch.stack([key.transpose(0, 1), value.transpose(0, 1)], dim=1)  # (tokens, 2, batch, heads, dim)
    here = [chunk] if mask is None else [chunk, mask[:, 0, 0].transpose(0, 1).contiguous()]  # (tokens, batch or 1)
    merged: tuple[Tensor, Tensor] | None = None
    for hop in range(hops):
        coming = [pass_on(each, hop) for each in here] if hop + 1 < hops else []
        part = kernel(query, key, value, mask, scale)
        merged = part if merged is None else merge(*merged, *part)
        if coming:
            here = [_COLLECTIVES.wait_tensor(each) for each in coming]
            key, value = (half.transpose(0, 1) for half in here[0].unbind(1))
            mask = None if mask is None else here[1].transpose(0, 1)[:, None, None]
    assert merged is not None
    return merged[0].to(query.dtype)


def merge(attended: Tensor, lse: Tensor, part: Tensor, part_lse: Tensor) -> tuple[Tensor, Tensor]:
    """Merge attention over two disjoint sets of keys: values, in float32 or wider, and their log-sum-exp, finite."""
    wide = torch.promote_types(attended.dtype, torch.float32)
    weight = torch.sigmoid(part_lse - lse).transpose(1, 2)[..., None].to(wide)
    return torch.lerp(attended.to(wide), part.to(wide), weight), torch.logaddexp(lse, part_lse)
