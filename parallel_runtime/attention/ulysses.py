"""Ulysses: tokens are split outside of attention, heads inside (DeepSpeed-Ulysses, arXiv 2309.14509).

Before attention every rank holds all heads of its own tokens, inside it holds all tokens of its own heads. The two
exchanges are yunchang's head all-to-alls; they trace under torch.compile(fullgraph=True), checked in the tests.
They want equal shares, so uneven ones are padded on the wire only: no padded key is ever attended.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
import torch.nn.functional as F
from yunchang.comm.all_to_all import all_to_all_4D, all_to_all_5D

from .kernels import AttentionKernel


def ulysses_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    kernel: AttentionKernel,
    group: dist.ProcessGroup,
    degree: int,
    lengths: tuple[int, ...] | None = None,
    scale: float | None = None,
) -> torch.Tensor:
    """Attend over the tokens of all ranks of the group. Collective over the group.

    Args:
        query, key, value: this rank's tokens, (batch, local tokens, heads, head dim), alike in shape and dtype.
        kernel: attention over whole sequences.
        group: the Ulysses group, of `degree` ranks.
        lengths: tokens of every rank in group order, from the plan and never from a collective; None when all ranks
            hold equally many, which costs no copies beside the exchange's own.
        scale: of the logits, None for 1/sqrt(head dim).

    Returns:
        Attended values of this rank's tokens, (batch, local tokens, heads, head dim).
    """
    tokens, heads = query.shape[1], query.shape[2]
    packed = torch.stack((query, key, value), dim=2)
    spare_heads = -heads % degree
    spare_tokens = 0 if lengths is None else max(lengths) - tokens
    if spare_heads or spare_tokens:
        packed = F.pad(packed, (0, 0, 0, spare_heads, 0, 0, 0, spare_tokens))
    packed = all_to_all_5D(packed, scatter_idx=3, gather_idx=1, group=group)
    if lengths is not None:
        packed = _drop_padding(packed, lengths)
    all_query, all_key, all_value = packed.unbind(2)
    attended = kernel(all_query, all_key, all_value, scale=scale)
    if lengths is not None:
        attended = _insert_padding(attended, lengths)
    attended = all_to_all_4D(attended, scatter_idx=1, gather_idx=2, group=group)
    return attended[:, :tokens, :heads]


def _drop_padding(packed: torch.Tensor, lengths: tuple[int, ...]) -> torch.Tensor:
    """(batch, ranks · longest, ...) -> (batch, sum of lengths, ...)."""
    longest = max(lengths)
    return torch.cat([packed.narrow(1, rank * longest, length) for rank, length in enumerate(lengths)], dim=1)


def _insert_padding(attended: torch.Tensor, lengths: tuple[int, ...]) -> torch.Tensor:
    """(batch, sum of lengths, heads, head dim) -> (batch, ranks · longest, heads, head dim)."""
    longest = max(lengths)
    shares = attended.split(lengths, dim=1)
    return torch.cat([F.pad(share, (0, 0, 0, 0, 0, longest - share.shape[1])) for share in shares], dim=1)
