"""Ulysses through the host's memory, heads in chunks: while a GPU attends with one chunk, the next one travels.

For GPUs of one host that do not reach each other's memory. The exchange is that of attention/over_ranks.py, in another
order: query, key and value of all chunks go out first, then attended values, chunk by chunk, as they are computed.
Copy engines do the copies, one in each direction. What is not hidden is the first chunk's way in and the last one's
back, but where a compiled block has a layer beside attention to compute then (layer_beside.py). A chunk goes in pieces,
so that it comes in on one GPU while the rest of it still goes out of the other."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

import torch
from torch import Tensor

from ..attention.kernels import Attend
from ..attention.over_ranks import even_heads
from ..mesh.launched import unbroken
from .host_lanes import HEADS, SLOTS, Exchange, StreamMemory
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
    group. Buffers are for these shapes, heads rounded up to a multiple of the ranks. A layer `beside` attention is
    begun, and not ended, which is the caller's."""
    parts = even_heads(len(buffers.lengths), query, key, value)
    wire = [part.unflatten(2, (len(buffers.lengths), -1)).permute(2, 1, 0, 3, 4) for part in parts]
    return _Heads(buffers, wire).go(kernel, scale, beside)[:, :, : query.shape[2]]


class _Heads:
    """The way of one attention's heads between the ranks: they come in, then attended values go back, chunk by chunk.
    All memory but that of results is taken on the caller's stream before the first message, and held until the last.
    `wire` are queries, keys and values, (ranks, own tokens, batch, heads of a rank, head dim), the first dim the rank
    that they go to."""

    def __init__(self, buffers: HostBuffers, wire: Sequence[Tensor]):
        lengths, rank, chunks = buffers.lengths, buffers.rank, buffers.chunks
        degree, own, batch, _, head_dim = wire[0].shape
        self._rank, self._lengths, self._pieces = rank, lengths, buffers.pieces
        self._cuts = list(pairwise(accumulate(chunks, initial=0)))
        self._exchange = Exchange(buffers.memory, rank, HEADS)
        self._output = wire[0].new_empty((batch, own, degree, sum(chunks), head_dim))
        self._returned = [wire[0].new_empty((degree, own, batch, size, head_dim)) for size in chunks]
        self._landing = [wire[0].new_empty((sum(lengths), batch, 3, size, head_dim)) for size in chunks]
        self._outgoing: list[tuple[Mapping[int, Tensor], object]] = []  # messages: by who gets it, and when it is made
        for landing, (start, stop) in zip(self._landing, self._cuts, strict=True):
            packed = torch.stack([part[:, :, :, start:stop] for part in wire], dim=3)
            self._of_rank(landing, rank).copy_(packed[rank])
            self._post({to: packed[to] for to in self._exchange.others})

    def go(self, kernel: Attend, scale: float | None, beside: LayerBeside | None) -> Tensor:
        """Attended values of this rank's tokens, (batch, local tokens, heads, head dim)."""
        if beside is not None:
            beside.begin()  # behind what is sent, which waits for that alone
        with unbroken():
            return self._exchanged(kernel, scale, beside)

    def _exchanged(self, kernel: Attend, scale: float | None, beside: LayerBeside | None) -> Tensor:
        before, sent = len(self._outgoing), 0
        for message in range(2 * before):
            while sent < min(len(self._outgoing), message + SLOTS):
                self._exchange.send(sent, *self._outgoing[sent])
                sent += 1
            self._exchange.receive(message, self._coming(message))
            chunk, piece = divmod(message, self._pieces)
            if chunk < len(self._cuts) and piece == self._pieces - 1:
                self._exchange.take(message)
                self._attend(chunk, kernel, scale)
        if beside is not None:
            beside.go_on()
        for chunk, (start, stop) in enumerate(self._cuts):
            self._exchange.take(before + (chunk + 1) * self._pieces - 1)
            self._output[:, :, :, start:stop] = self._returned[chunk].permute(2, 1, 0, 3, 4)
        return self._output.flatten(2, 3)

    def _coming(self, message: int) -> Mapping[int, Tensor]:
        """Where a message of each other rank belongs."""
        chunk, piece = divmod(message, self._pieces)
        if chunk < len(self._cuts):
            parts = {source: self._of_rank(self._landing[chunk], source) for source in self._exchange.others}
        else:
            parts = {source: self._returned[chunk - len(self._cuts)][source] for source in self._exchange.others}
        return self._cut(parts)[piece]

    def _attend(self, chunk: int, kernel: Attend, scale: float | None) -> None:
        query, key, value = (part.transpose(0, 1) for part in self._landing[chunk].unbind(2))
        attended = kernel(query, key, value, None, scale).transpose(0, 1).contiguous()
        self._post({to: self._of_rank(attended, to) for to in self._exchange.others})
        self._returned[chunk][self._rank].copy_(self._of_rank(attended, self._rank))

    def _post(self, parts: Mapping[int, Tensor]) -> None:
        """What is made now goes to the others in pieces."""
        ready = self._exchange.mark()
        self._outgoing += [(piece, ready) for piece in self._cut(parts)]

    def _cut(self, parts: Mapping[int, Tensor]) -> list[Mapping[int, Tensor]]:
        """Some of the tokens of each part, cut alike where they are sent and where they are received."""
        pieces = {rank: part.tensor_split(self._pieces) for rank, part in parts.items()}
        return [{rank: pieces[rank][piece] for rank in pieces} for piece in range(self._pieces)]

    def _of_rank(self, tokens: Tensor, rank: int) -> Tensor:
        """The tokens of one rank among those of all."""
        return tokens.split(self._lengths)[rank]
