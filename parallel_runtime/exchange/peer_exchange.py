"""Ulysses over peer memory: on GPUs of one host that can write to each other's memory, the exchange is those writes.

One kernel writes each head of query, key and value where the rank that attends with it reads it; a second one writes
the attended values back. Blocks give it more to do where they can (acceleration/attention_pass.py): norm and rotary
embedding, in the kernel that writes heads; and the feed-forward layer beside attention (FLUX's single blocks), which
is computed while heads are on their way, and its share of the output projection while attended values are. What travels
beside a matrix product is moved by the GPU's copy engines: the product wants every multiprocessor. So is all that
travels where NVLink does not join the GPUs.

The two barriers of an attention also keep the buffers apart from call to call: a rank writes to a peer's `landing`
only after the peer came to the second barrier, so after its attention has read the call before; and to its `returned`
only after the next first barrier."""

from __future__ import annotations

import functools
import math
from typing import Any

import torch
from torch import Tensor

from ..attention.kernels import Attend
from ..attention.over_ranks import even_heads
from ..attention.rotary import Tensors, apply_norms
from .grown_memory import PeerBuffers
from .layer_beside import LayerBeside

_WORD = torch.int64  # rows are moved as words of 8 bytes, whatever the dtype


def peer_attention(
    query: Tensor, key: Tensor, value: Tensor, *, kernel: Attend, buffers: PeerBuffers, scale: float | None = None
) -> Tensor:
    """Attend over the tokens of all ranks; as `ulysses_attention`, for any lengths. Collective over the group. Buffers
    are for these shapes, heads rounded up to a multiple of the ranks."""
    heads = query.shape[2]
    query, key, value = even_heads(len(buffers.lengths), query, key, value)
    return attend_over_peers([query], [key], [value], [], 0.0, [], kernel, buffers, scale)[:, :, :heads]


def attend_over_peers(
    queries: Tensors, keys: Tensors, values: Tensors, norms: Tensors, eps: float, beside: Tensors, kernel: Attend,
    buffers: PeerBuffers, scale: float | None,
) -> Tensor:  # fmt: skip
    """From projections to attended values, (batch, own tokens, heads, head dim), or to what the block makes of them,
    (batch, own tokens, width). Collective over the group.

    Queries, keys and values are (batch, tokens of the part, heads, head dim) for each part of the own tokens, such as
    text and image. `norms`: [], or what `rotary.apply_norms` makes of queries and keys. `beside`: [], or
    what a `LayerBeside` is made of."""
    import torch.distributed._symmetric_memory as symmetric_memory

    ranks = symmetric_memory.rendezvous(buffers.memory, buffers.group)  # type: ignore[arg-type] # a str, before torch 2.13 too
    layer = LayerBeside(beside) if beside else None
    staged = layer is not None or not buffers.by_stores
    exchange = _Exchange(ranks, queries[0], buffers, staged)
    exchange.send_heads(queries, keys, values, norms, eps)
    if not staged:
        ranks.barrier(channel=0)
        exchange.return_tokens(exchange.attend(kernel, scale))
        ranks.barrier(channel=0)
        return exchange.returned().unflatten(2, (exchange.heads, exchange.head_dim))
    compute, links = torch.cuda.current_stream(), _links(buffers.memory.device.index)
    links.wait_stream(compute)
    with torch.cuda.stream(links):
        exchange.move_heads()
    if layer is not None:
        layer.begin()
    compute.wait_stream(links)
    attended = exchange.attend(kernel, scale)
    links.wait_stream(compute)
    with torch.cuda.stream(links):
        exchange.move_tokens(attended)
    if layer is not None:
        layer.go_on()
    compute.wait_stream(links)
    returned = exchange.returned()
    return layer.end(returned) if layer is not None else returned.unflatten(2, (exchange.heads, exchange.head_dim))


@functools.cache
def _links(device: int) -> torch.cuda.Stream:
    """The stream of a GPU that moves data to others beside its products; it comes first, as the products' end waits."""
    return torch.cuda.Stream(device, priority=-1)


class _Exchange:
    """The way of one attention's tensors between the ranks. In `staging`, (ranks, own tokens, batch, 3, heads / ranks,
    head dim), lie heads that copy engines are to move; None where the kernel itself writes them to the others."""

    def __init__(self, ranks: Any, query: Tensor, buffers: PeerBuffers, staged: bool):
        self.ranks, self.memory, self.table = ranks, buffers.memory, buffers.table
        self.offset, self.lengths = buffers.returned, buffers.lengths
        self.batch, _, self.heads, self.head_dim = query.shape
        self.dtype = query.dtype
        self.own = self.lengths[ranks.rank]
        self.heads_per_rank = self.heads // ranks.world_size
        # Of a token's heads of one rank, in all items of the batch.
        self.elements_per_token = self.batch * self.heads_per_rank * self.head_dim
        self.staging: Tensor | None = None
        if staged:
            each = (self.own, self.batch, 3, self.heads_per_rank, self.head_dim)
            self.staging = query.new_empty((ranks.world_size, *each))

    @property
    def others(self) -> list[int]:
        """The other ranks; not everyone begins with the same."""
        return [(self.ranks.rank + step) % self.ranks.world_size for step in range(1, self.ranks.world_size)]

    def send_heads(self, queries: Tensors, keys: Tensors, values: Tensors, norms: Tensors, eps: float) -> None:
        """Write heads where they belong, those of other ranks to `staging` if there is one."""
        from .peer_kernels import push_heads, push_normed_heads

        place = (self.table, self.ranks.rank, self.ranks.world_size)
        if norms and self.head_dim & (self.head_dim - 1) == 0:
            push_normed_heads(queries, keys, values, norms, eps, *place, self.staging)
            return
        if norms:
            query, key = apply_norms(queries, keys, norms, eps)
            queries, keys = [query], [key]
        whole = [parts[0] if len(parts) == 1 else torch.cat(parts, 1) for parts in (queries, keys, values)]
        staging = None if self.staging is None else self.staging.flatten(4).view(_WORD)
        push_heads([_words(part) for part in whole], *place, staging)

    def move_heads(self) -> None:
        """Copy what is staged to the other ranks, and wait for theirs."""
        assert self.staging is not None
        start = sum(self.lengths[: self.ranks.rank]) * 3 * self.elements_per_token
        for to in self.others:
            self.ranks.get_buffer(to, self.staging.shape[1:], self.dtype, start).copy_(self.staging[to])
        self.ranks.barrier(channel=0)

    def attend(self, kernel: Attend, scale: float | None) -> Tensor:
        """Attended values of this rank's heads, (batch, tokens of all ranks, heads / ranks, head dim)."""
        landing = self._view(0, (sum(self.lengths), self.batch, 3, self.heads_per_rank, self.head_dim))
        query, key, value = (part.transpose(0, 1) for part in landing.unbind(2))
        return kernel(query, key, value, None, scale)

    def return_tokens(self, attended: Tensor) -> None:
        """Write attended values to the ranks whose tokens they are, where `move_tokens` copies them: a rank may do
        either, as another's block may have a layer beside it or not."""
        from .peer_kernels import push_tokens

        push_tokens(_words(attended), self.table, self.ranks.rank, self.ranks.world_size)

    def move_tokens(self, attended: Tensor) -> None:
        """Copy attended values to the ranks whose tokens they are, and wait for what is ours; ranks one by one."""
        pieces = attended.transpose(0, 1).contiguous().split(self.lengths)  # or a kernel would copy them
        for to in (*self.others, self.ranks.rank):
            start = self.offset // self.dtype.itemsize + self.ranks.rank * self.lengths[to] * self.elements_per_token
            self.ranks.get_buffer(to, pieces[to].shape, self.dtype, start).copy_(pieces[to])
        self.ranks.barrier(channel=0)

    def returned(self) -> Tensor:
        """What all ranks wrote here, (batch, own tokens, width): a copy."""
        shape = (self.ranks.world_size, self.own, self.batch, self.heads_per_rank * self.head_dim)
        return torch.cat([part.transpose(0, 1) for part in self._view(self.offset, shape).unbind(0)], -1)

    def _view(self, start: int, shape: tuple[int, ...]) -> Tensor:
        return self.memory[start : start + math.prod(shape) * self.dtype.itemsize].view(self.dtype).view(shape)


def _words(part: Tensor) -> Tensor:
    """(batch, tokens, heads, head dim) -> (batch, tokens, words): a token's heads lie side by side."""
    if part.stride(3) != 1 or part.stride(2) != part.shape[3]:
        part = part.contiguous()
    return part.flatten(2).view(_WORD)
