"""Ulysses: tokens are split outside of attention, heads inside (DeepSpeed-Ulysses, arXiv 2309.14509).

Before attention every rank holds all heads of its own tokens, inside it holds all tokens of its own heads. The two
exchanges are yunchang's head all-to-alls; they trace under torch.compile(fullgraph=True), checked in the tests.
They want equal shares, so uneven ones are padded on the wire only: no padded key is ever attended.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.nn.functional as F
from yunchang.comm.all_to_all import all_to_all_4D, all_to_all_5D

from .kernels import AttentionKernel


@dataclass(frozen=True)
class WireLayout:
    """Where tokens lie when ranks hold unequal numbers of them and the exchange wants equal shares.

    Index tensors and not numbers, because numbers would become constants of a compiled graph: every size of picture
    would then need a graph of its own.

    Args:
        own: (longest,) this rank's tokens with the last one repeated.
        kept: (tokens of all ranks,) where each token lies on the wire.
        spread: (ranks · longest,) the token that lies at each place of the wire.
    """

    own: torch.Tensor
    kept: torch.Tensor
    spread: torch.Tensor

    @classmethod
    def build(cls, lengths: tuple[int, ...], rank: int, device: torch.device) -> WireLayout:
        """Lay out ranks of these lengths, each at least 1, from the plan alone: no collective."""
        places = torch.arange(max(lengths)).expand(len(lengths), -1)
        counts = torch.tensor(lengths)[:, None]
        starts = counts.cumsum(0) - counts
        tokens = places.minimum(counts - 1)  # padding repeats a rank's last token
        kept = (places < counts).flatten().nonzero().flatten()
        layout = cls(tokens[rank].to(device), kept.to(device), (starts + tokens).flatten().to(device))
        for indices in (layout.own, layout.kept, layout.spread):
            # They reach a graph as attributes, whose sizes torch.compile does not learn to be dynamic by itself.
            torch._dynamo.maybe_mark_dynamic(indices, 0)
        return layout


def ulysses_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    kernel: AttentionKernel,
    group: dist.ProcessGroup,
    degree: int,
    layout: WireLayout | None = None,
    scale: float | None = None,
) -> torch.Tensor:
    """Attend over the tokens of all ranks of the group. Collective over the group.

    Args:
        query, key, value: this rank's tokens, (batch, local tokens, heads, head dim), alike in shape and dtype.
        kernel: attention over whole sequences.
        group: the Ulysses group, of `degree` ranks.
        layout: None when all ranks hold equally many tokens; it then costs no copy beside the exchange's own.
        scale: of the logits, None for 1/sqrt(head dim).

    Returns:
        Attended values of this rank's tokens, (batch, local tokens, heads, head dim).
    """
    tokens, heads = query.shape[1], query.shape[2]
    packed = torch.stack((query, key, value), dim=2)
    if heads % degree:
        packed = F.pad(packed, (0, 0, 0, -heads % degree))
    if layout is not None:
        packed = packed.index_select(1, layout.own)
    packed = all_to_all_5D(packed, scatter_idx=3, gather_idx=1, group=group)
    if layout is not None:
        packed = packed.index_select(1, layout.kept)
    all_query, all_key, all_value = packed.unbind(2)
    attended = kernel(all_query, all_key, all_value, scale=scale)
    if layout is not None:
        attended = attended.index_select(1, layout.spread)
    attended = all_to_all_4D(attended, scatter_idx=1, gather_idx=2, group=group)
    if heads % degree:
        attended = attended.narrow(2, 0, heads)
    return attended.narrow(1, 0, tokens) if layout is not None else attended
