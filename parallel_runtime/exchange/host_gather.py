"""Ulysses through the host's memory by what heads are made of: ranks send the input of a block's layers, and each makes
its own heads of all tokens, those of its own tokens while the others come. On two ranks that is three quarters of the
bytes that queries, keys, values and attended values have, and half of them where layers take float8. Attended values go
back as in host_exchange.py.

A rank whose block has no such layers could not take part, so ranks agree beforehand (`OtherWay` in
acceleration/recorded_kinds.py)."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate, pairwise

import torch
from torch import Tensor

from ..attention.kernels import Attend
from ..attention.projections import Parts, Projections
from ..attention.rotary import apply_norms
from . import host_lanes
from .host_exchange import HostBuffers, Way
from .host_lanes import INPUTS
from .layer_beside import LayerBeside

_PIECES = 4
"""In which an input comes, at most: while one is multiplied, the next travels."""


def gather_through_host(
    layers: Projections, norms: list[Tensor], eps: float, sizes: Sequence[Sequence[int]], *, kernel: Attend,
    buffers: HostBuffers, scale: float | None = None, beside: LayerBeside | None = None,
) -> Tensor:  # fmt: skip
    """As `project_through_host`. `sizes` are the tokens of each part on each rank."""
    return _Inputs(layers, norms, eps, sizes, buffers).go(kernel, scale, beside)


class _Inputs(Way):
    """Inputs come, with the angles of their tokens, some tokens after the other."""

    def __init__(
        self, layers: Projections, norms: list[Tensor], eps: float, sizes: Sequence[Sequence[int]], buffers: HostBuffers
    ):
        super().__init__(buffers, layers.like, layers.head_dim, INPUTS)
        self._layers, self._eps, self._sizes = layers, eps, sizes
        *self._weights, cos, sin = norms
        # Of all tokens of a rank, or of those of a part: (tensor, part). Those of more bytes first, so that all begin
        # where their type can.
        self._given: list[tuple[Tensor, int | None]] = [(cos, None), (sin, None)]
        self._order = sorted(range(len(layers.inputs)), key=lambda index: -layers.inputs[index].itemsize)
        self._given += [(layers.inputs[index], layers.part_of[index]) for index in self._order]
        self._count = self._pieces_of(buffers)
        packed = [torch.cat([_bytes(each) for each in self._of(piece)]) for piece in range(self._count)]
        ready = self._exchange.mark()
        self._outgoing += [(dict.fromkeys(self._exchange.others, each), ready) for each in packed]
        self._boxes = {
            source: [cos.new_empty(self._size(source, piece), dtype=torch.uint8) for piece in range(self._count)]
            for source in self._exchange.others
        }
        self._made: dict[int, list[Sequence[Tensor]]] = {source: [] for source in range(len(buffers.lengths))}
        self._made[self._rank].append(self._heads([tensor for tensor, _ in self._given]))

    def _pieces_of(self, buffers: HostBuffers) -> int:
        """How many: no more than are worth a message, no fewer than its room asks for. The same on all ranks."""
        longest = max(buffers.lengths)
        parts = len(self._sizes)
        of_token = [sum(_row(each) for each, part in self._given if part in (None, here)) for here in range(parts)]
        least = -(-longest // (buffers.memory.slots.room // max(of_token)))
        return max(1, least, min(_PIECES, longest, longest * max(of_token) // host_lanes.LEAST_MESSAGE))

    def _spans(self, source: int, piece: int) -> Iterator[tuple[Tensor, int, int]]:
        """What is given, with which tokens of it are in a piece of a rank's."""
        length = self._lengths[source]
        start, stop = (length * index // self._count for index in (piece, piece + 1))
        borders = list(pairwise(accumulate((each[source] for each in self._sizes), initial=0)))
        for tensor, part in self._given:
            first, last = (0, length) if part is None else borders[part]
            begin, end = (min(max(each, first), last) - first for each in (start, stop))
            yield tensor, begin, end

    def _of(self, piece: int) -> list[Tensor]:
        """A piece of what is this rank's."""
        return [tensor.narrow(-2, begin, end - begin) for tensor, begin, end in self._spans(self._rank, piece)]

    def _size(self, source: int, piece: int) -> int:
        return sum(_row(tensor) * (end - begin) for tensor, begin, end in self._spans(source, piece))

    def _unpacked(self, source: int, piece: int) -> list[Tensor]:
        spans = list(self._spans(source, piece))
        sizes = [_row(tensor) * (end - begin) for tensor, begin, end in spans]
        parts = zip(self._boxes[source][piece].split(sizes), spans, strict=True)
        return [
            part.view(tensor.dtype).view(*tensor.shape[:-2], end - begin, tensor.shape[-1])
            for part, (tensor, begin, end) in parts
        ]

    def _heads(self, given: Sequence[Tensor]) -> Sequence[Tensor]:
        """This rank's heads of some tokens: queries, keys and values (batch, tokens, heads / ranks, head dim)."""
        cos, sin, *others = given
        inputs = [others[self._order.index(index)] for index in range(len(others))]
        degree, heads = len(self._lengths), self._layers.heads
        parts: Parts = self._layers.of_heads([self._rank], degree, 0, heads // degree, inputs)
        some = [index for index, part in enumerate(parts[0]) if part.shape[1]]
        queries, keys, values = ([kind[index] for index in some] for kind in parts)
        weights = [self._weights[half * len(parts[0]) + index] for half in range(2) for index in some]
        value = values[0] if len(values) == 1 else torch.cat(values, 1)
        return *apply_norms(queries, keys, [*weights, cos, sin], self._eps), value

    def _coming(self, message: int) -> Mapping[int, Tensor]:
        return {source: boxes[message] for source, boxes in self._boxes.items()}

    def _came(self, message: int) -> None:
        self._exchange.take(message)
        for source in self._boxes:
            if self._boxes[source][message].numel():
                self._made[source].append(self._heads(self._unpacked(source, message)))
        if message == self._count - 1:
            in_order = [made for source in sorted(self._made) for made in self._made[source]]
            query, key, value = (torch.cat(parts, 1) for parts in zip(*in_order, strict=True))
            for chunk, (start, stop) in enumerate(self._cuts):
                self._attend(chunk, *(each[:, :, start:stop] for each in (query, key, value)))


def _row(tensor: Tensor) -> int:
    """Bytes of a token, in all items of the batch."""
    return math.prod((*tensor.shape[:-2], tensor.shape[-1])) * tensor.itemsize


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(-1).view(torch.uint8)
