"""Ulysses through the host's memory, heads in chunks: while a GPU attends with one chunk, the next one travels.

For GPUs of one host that do not reach each other's memory. The exchange is that of attention/over_ranks.py, in another
order: query, key and value of all chunks go out first, then attended values, chunk by chunk, as they are computed.
Copy engines do the copies, one in each direction. What is not hidden is the first chunk's way in and the last one's
back, but for a layer beside attention (layer_beside.py), which is computed then. A chunk goes in pieces, so that it
comes in on one GPU while the rest of it still goes out of the other."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

import torch
from torch import Tensor

from ..attention.kernels import Attend
from ..attention.over_ranks import even_heads
from ..attention.projections import Projections
from ..attention.rotary import apply_norms
from ..mesh.launched import unbroken
from .host_lanes import SLOTS, Exchange, StreamMemory
from .layer_beside import LayerBeside


@dataclass(frozen=True)
class HostBuffers:
    """How attention of one shape goes through the memory that the ranks share: by the tokens of each rank and the heads
    of each chunk, altogether those of a rank, which goes in pieces with some of the tokens: messages."""

    memory: StreamMemory
    rank: int
    lengths: tuple[int, ...]
    chunks: tuple[int, ...]
    pieces: int = 1


def attend_through_host(
    query: Tensor, key: Tensor, value: Tensor, *, kernel: Attend, buffers: HostBuffers, scale: float | None = None,
    beside: LayerBeside | None = None,
) -> Tensor:  # fmt: skip
    """Attend over the tokens of all ranks; as `ulysses_attention`, with its bits, for any lengths. Collective over the
    group. Buffers are for these shapes, heads rounded up to a multiple of the ranks. A layer `beside` it is begun, and
    not ended, which is the caller's."""
    parts = even_heads(len(buffers.lengths), query, key, value)
    wire = [part.unflatten(2, (len(buffers.lengths), -1)).permute(2, 1, 0, 3, 4) for part in parts]
    way = _Way(buffers, query, query.shape[3], lambda start, stop: [part[:, :, :, start:stop] for part in wire])
    return way.go(kernel, scale, beside)[:, :, : query.shape[2]]


def project_through_host(
    layers: Projections, norms: list[Tensor], eps: float, *, kernel: Attend, buffers: HostBuffers,
    scale: float | None = None, beside: LayerBeside | None = None,
) -> Tensor:  # fmt: skip
    """The same, to rounding, of the layers that make queries, keys and values, and norms as of `rotary.apply_norms`:
    while some heads travel, others are made. Messages are the same, so another rank may do either. As many heads come
    from each rank."""
    degree = len(buffers.lengths)
    *weights, cos, sin = norms
    if cos.dim() == 3 and cos.shape[0] > 1:  # a row for each item of the batch
        cos, sin = (each.repeat(degree, 1, 1) for each in (cos, sin))

    def made(start: int, stop: int) -> list[Tensor]:
        queries, keys, values = layers.of_heads(degree, start, stop)
        value = values[0] if len(values) == 1 else torch.cat(values, 1)
        parts = (*apply_norms(queries, keys, [*weights, cos, sin], eps), value)
        return [part.unflatten(0, (degree, -1)).transpose(1, 2) for part in parts]

    return _Way(buffers, layers.inputs[0], layers.head_dim, made).go(kernel, scale, beside)


class _Way:
    """The way of one attention's tensors between the ranks: of n chunks, load c has the heads of chunk c, and load
    n + c what was attended with them. All memory but that of results is taken on the caller's stream before the first
    message, and held until the last.

    `made` gives queries, keys and values with some heads of each rank, from one to another: (ranks, own tokens, batch,
    heads of the chunk, head dim), the first dim the rank that they go to. `like` has batch, dtype and device."""

    def __init__(self, buffers: HostBuffers, like: Tensor, head_dim: int, made: Callable[[int, int], Sequence[Tensor]]):
        lengths, rank, chunks = buffers.lengths, buffers.rank, buffers.chunks
        batch, own, degree = like.shape[0], lengths[rank], len(lengths)
        self._rank, self._lengths, self._chunks, self._pieces = rank, lengths, chunks, buffers.pieces
        self._cuts = list(accumulate(chunks, initial=0))
        self._exchange = Exchange(buffers.memory, rank)
        self._output = like.new_empty((batch, own, degree, sum(chunks), head_dim))
        self._landing = [like.new_empty((sum(lengths), batch, 3, size, head_dim)) for size in chunks]
        self._returned = [like.new_empty((degree, own, batch, size, head_dim)) for size in chunks]
        self._loads: list[tuple[dict[int, Tensor], object]] = []  # that can be sent, by who gets it, and when
        for chunk, (start, stop) in enumerate(pairwise(self._cuts)):
            self._pack(chunk, made(start, stop))

    def go(self, kernel: Attend, scale: float | None, beside: LayerBeside | None) -> Tensor:
        """Attended values of this rank's tokens, (batch, local tokens, heads, head dim)."""
        if beside is not None:
            beside.begin()  # behind what packs heads, which these wait for alone
        with unbroken():
            return self._exchanged(kernel, scale, beside)

    def _exchanged(self, kernel: Attend, scale: float | None, beside: LayerBeside | None) -> Tensor:
        count, pieces, sent = len(self._chunks), self._pieces, 0
        for message in range(2 * count * pieces):
            while sent < min(len(self._loads) * pieces, message + SLOTS):
                parts, ready = self._loads[sent // pieces]
                self._exchange.send(sent, self._piece(parts, sent % pieces), ready)
                sent += 1
            load, piece = divmod(message, pieces)
            self._exchange.receive(message, self._piece(self._coming(load), piece))
            if load < count and piece == pieces - 1:
                self._exchange.take(message)
                self._attend(load, kernel, scale)
        if beside is not None:
            beside.go_on()
        for chunk, (start, stop) in enumerate(pairwise(self._cuts)):
            self._exchange.take((count + chunk + 1) * pieces - 1)
            self._output[:, :, :, start:stop] = self._returned[chunk].permute(2, 1, 0, 3, 4)
        return self._output.flatten(2, 3)

    def _pack(self, chunk: int, parts: Sequence[Tensor]) -> None:
        packed = torch.stack([*parts], dim=3)
        self._of_rank(self._landing[chunk], self._rank).copy_(packed[self._rank])
        self._loads.append(({to: packed[to] for to in self._exchange.others}, self._exchange.mark()))

    def _attend(self, chunk: int, kernel: Attend, scale: float | None) -> None:
        query, key, value = (part.transpose(0, 1) for part in self._landing[chunk].unbind(2))
        attended = kernel(query, key, value, None, scale).transpose(0, 1).contiguous()
        parts = {to: self._of_rank(attended, to) for to in self._exchange.others}
        self._loads.append((parts, self._exchange.mark()))
        self._returned[chunk][self._rank].copy_(self._of_rank(attended, self._rank))

    def _coming(self, load: int) -> dict[int, Tensor]:
        """Where the others' parts of a load belong."""
        others, count = self._exchange.others, len(self._chunks)
        if load >= count:
            return {source: self._returned[load - count][source] for source in others}
        return {source: self._of_rank(self._landing[load], source) for source in others}

    def _piece(self, parts: dict[int, Tensor], piece: int) -> dict[int, Tensor]:
        """Some of the tokens of each part, cut alike where it is sent and where it is received."""
        return {rank: part.tensor_split(self._pieces)[piece] for rank, part in parts.items()}

    def _of_rank(self, tokens: Tensor, rank: int) -> Tensor:
        """The tokens of one rank among those of all."""
        return tokens.split(self._lengths)[rank]
