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
from ..attention.projections import Projections
from ..attention.rotary import apply_norms
from . import host_lanes
from .host_exchange import HostBuffers, Way
from .host_lanes import INPUTS

_PIECES = 4
"""In which an input comes, at most: while one is multiplied, the next travels."""


def gather_through_host(
    layers: Projections, norms: list[Tensor], eps: float, sizes: Sequence[Sequence[int]], *, kernel: Attend,
    buffers: HostBuffers, scale: float | None = None,
) -> Tensor:  # fmt: skip
    """As `project_through_host`. `sizes` are the tokens of each part on each rank."""
    return _Inputs(layers, norms, eps, sizes, buffers).go(kernel, scale, None)


class _Inputs(Way):
    """Inputs come, with the angles of their tokens, some tokens after the other."""

    def __init__(
        self, layers: Projections, norms: list[Tensor], eps: float, sizes: Sequence[Sequence[int]], buffers: HostBuffers
    ):
        super().__init__(buffers, layers.like, layers.head_dim, INPUTS)
        degree, heads = len(buffers.lengths), layers.heads // len(buffers.lengths)
        self._own_heads = layers.of_heads([self._rank], degree, 0, heads)
        self._eps, self._sizes = eps, sizes
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
        shape = layers.like.shape[0], sum(buffers.lengths), heads, layers.head_dim
        self._whole = [layers.like.new_empty(shape) for _ in range(3)]  # queries, keys and values of all tokens
        self._make(self._rank, 0, [tensor for tensor, _ in self._given])

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

    def _make(self, source: int, start: int, given: Sequence[Tensor]) -> None:
        """This rank's heads of some tokens of a rank's, from one on."""
        cos, sin, *others = given
        queries, keys, values = self._own_heads([others[self._order.index(index)] for index in range(len(others))])
        some = [index for index, part in enumerate(queries) if part.shape[1]]
        weights = [self._weights[half * len(queries) + index] for half in range(2) for index in some]
        queries, keys = ([kind[index] for index in some] for kind in (queries, keys))
        query, key = apply_norms(queries, keys, [*weights, cos, sin], self._eps)
        first = sum(self._lengths[:source]) + start
        for whole, parts in zip(self._whole, ([query], [key], values), strict=True):
            torch.cat(parts, 1, out=whole[:, first : first + cos.shape[-2]])

    def _coming(self, message: int) -> Mapping[int, Tensor]:
        return {source: boxes[message] for source, boxes in self._boxes.items()}

    def _came(self, message: int) -> None:
        self._exchange.take(message)
        for source in self._boxes:
            if self._boxes[source][message].numel():
                self._make(source, self._lengths[source] * message // self._count, self._unpacked(source, message))
        if message == self._count - 1:
            for chunk, (start, stop) in enumerate(self._cuts):
                self._attend(chunk, *(each[:, :, start:stop] for each in self._whole))


def _row(tensor: Tensor) -> int:
    """Bytes of a token, in all items of the batch."""
    return math.prod((*tensor.shape[:-2], tensor.shape[-1])) * tensor.itemsize


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(-1).view(torch.uint8)
