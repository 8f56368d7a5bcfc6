"""Attention over the tokens of several ranks by collectives.

Ulysses (DeepSpeed-Ulysses, arXiv 2309.14509): tokens are split outside of attention, heads inside. One functional
all-to-all carries query, key and value, a second one the attended values. The wire has tokens outermost: attention
reads what arrives as strided views. Uneven shares are padded on the wire only: no padded key is attended.

Ring (arXiv 2310.01889, inference only): queries stay, keys and values go round. Each rank attends to one chunk of the
keys while that is on its way to the next rank, and merges by the log-sum-exp, in float32. A hop is one message, K and V
together, of the chunk's length: an all-to-all in which only one share is not empty."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from .kernels import Attend, AttendWithLse

_COLLECTIVES = torch.ops._c10d_functional


@dataclass(frozen=True)
class WireLayout:
    """Where tokens lie when ranks hold unequal numbers of them and the exchange wants equal shares."""

    own: Tensor  # (longest,) this rank's tokens with the last one repeated
    kept: Tensor  # (tokens of all ranks,) where each token lies on the wire
    spread: Tensor  # (ranks * longest,) the token that lies at each place of the wire

    @classmethod
    def build(cls, lengths: tuple[int, ...], rank: int, device: torch.device) -> WireLayout:
        """Lay out ranks of these lengths, each at least 1, from the plan alone: no collective."""
        places = torch.arange(max(lengths)).expand(len(lengths), -1)
        counts = torch.tensor(lengths)[:, None]
        starts = counts.cumsum(0) - counts
        tokens = places.minimum(counts - 1)  # padding repeats a rank's last token
        kept = (places < counts).flatten().nonzero().flatten()
        return cls(tokens[rank].to(device), kept.to(device), (starts + tokens).flatten().to(device))


def ulysses_attention(
    query: Tensor, key: Tensor, value: Tensor, *, kernel: Attend, group: dist.ProcessGroup,
    layout: WireLayout | None = None, mask: Tensor | None = None, scale: float | None = None,
) -> Tensor:  # fmt: skip
    """Attend over the tokens of all ranks of the Ulysses group, and return this rank's. Collective over the group.

    Tensors are this rank's tokens, (batch, local tokens, heads, head dim), alike in shape and dtype; the mask is of its
    own keys, (batch or 1, 1, 1, local tokens), on all ranks or on none; `layout` is None when all hold equally many.
    `kernel` attends for this rank's heads with the group's tokens to these (a kernel's `attend`), or goes on from there
    to those of other groups (`ring_attention`); its mask is of all of the keys."""
    tokens, heads, degree = query.shape[1], query.shape[2], group.size()
    parts = [_to_wire(part, degree, layout) for part in even_heads(degree, query, key, value)]
    whole = _all_to_all(torch.stack(parts, dim=3), group).flatten(0, 1)  # (tokens of all ranks, batch, 3, heads, dim)
    if layout is not None:
        whole = whole.index_select(0, layout.kept)
    all_query, all_key, all_value = (part.transpose(0, 1) for part in whole.unbind(2))
    all_mask = None if mask is None else _gather_mask(mask, group, layout)
    attended = kernel(all_query, all_key, all_value, all_mask, scale).transpose(0, 1)
    if layout is not None:
        attended = attended.index_select(0, layout.spread)
    # A view where the kernel wrote its output token by token, as PyTorch's do for such inputs and a batch of one.
    returned = _all_to_all(attended.unflatten(0, (degree, -1)).contiguous(), group)
    own = returned.permute(2, 1, 0, 3, 4).flatten(2, 3)  # (batch, local tokens, heads, head dim)
    return own[:, :tokens, :heads]


def even_heads(degree: int, *parts: Tensor) -> Sequence[Tensor]:
    """Parts (batch, tokens, heads, head dim) with zeros behind, so that as many heads go to each rank."""
    missing = -parts[0].shape[2] % degree
    return [F.pad(part, (0, 0, 0, missing)) for part in parts] if missing else parts


def _to_wire(part: Tensor, degree: int, layout: WireLayout | None) -> Tensor:
    """(batch, local tokens, heads, head dim) -> (degree, tokens on the wire, batch, heads / degree, head dim), a view
    where nothing is padded: the first dim is the rank that it goes to."""
    if layout is not None:
        part = part.index_select(1, layout.own)
    return part.unflatten(2, (degree, -1)).permute(2, 1, 0, 3, 4)


def _gather_mask(mask: Tensor, group: dist.ProcessGroup, layout: WireLayout | None) -> Tensor:
    """(batch or 1, 1, 1, local tokens) -> (batch or 1, 1, 1, tokens of all ranks)."""
    wire = mask[:, 0, 0].transpose(0, 1)
    wire = wire.contiguous() if layout is None else wire.index_select(0, layout.own)
    whole = _COLLECTIVES.wait_tensor(_COLLECTIVES.all_gather_into_tensor(wire, group.size(), group.group_name))
    if layout is not None:
        whole = whole.index_select(0, layout.kept)
    return whole.transpose(0, 1)[:, None, None]


def _all_to_all(wire: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Send wire[rank] to each rank; on the first dim of what comes back is the rank that it came from."""
    sizes = [1] * wire.shape[0]
    return _COLLECTIVES.wait_tensor(_COLLECTIVES.all_to_all_single(wire, sizes, sizes, group.group_name))


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
