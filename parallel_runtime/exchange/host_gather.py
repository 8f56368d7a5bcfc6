"""Attention over ranks by what keys and values are made of: ranks send the input of a block's layers through the host's
memory, and each makes keys and values of all tokens from it and attends with its own queries, so that nothing comes
back. On two ranks that is half of the bytes that queries, keys, values and attended values have, on three three
quarters, half as much where layers take float8 or int8; products that make keys and values are done for each rank's
tokens on every one. While the others' input comes, a rank makes what it can of its own, and computes the layer beside
attention, if there is one.

A rank whose block has no such layers could not take part, so ranks agree beforehand (`OtherWay` in
acceleration/recorded_kinds.py)."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import accumulate, pairwise

import torch
from torch import Tensor

from ..attention.kernels import Attend
from ..attention.projections import Projections
from ..attention.rotary import apply_norms, norm_rotate_one
from ..mesh.launched import unbroken
from .host_exchange import HostBuffers
from .host_lanes import INPUTS, SLOTS, Exchange
from .layer_beside import LayerBeside

_PIECES = 4
"""In which an input comes, at most: while one is multiplied, the next travels. (A step of FLUX.1 in float8 at 1024², on
one H200 as one of two: 63.8 ms with two, 63.3 with four, 66.2 with seven.)"""
_LEAST_PIECE = 1 << 20
"""Bytes: a message takes some 17 µs besides (by seven and four, in 57 blocks), nearly as long as so many travel."""


def gather_through_host(
    layers: Projections, norms: list[Tensor], eps: float, sizes: Sequence[Sequence[int]], *, kernel: Attend,
    buffers: HostBuffers, scale: float | None = None, beside: LayerBeside | None = None,
) -> Tensor:  # fmt: skip
    """As `attend_through_host`, to rounding, of the layers that make queries, keys and values, and of norms as of
    `rotary.apply_norms`. `sizes` are the tokens of each part on each rank."""
    sent = layers.sent()
    inputs = _Inputs(layers, sent, norms, sizes, buffers)  # travels behind its packing alone, whatever comes next
    queries, keys, values = layers.of_all_heads((0, 1, 2), sent=True)(sent)
    query, key = apply_norms(queries, keys, norms, eps)
    place, parts, made = key.shape[1], len(sizes), layers.of_all_heads((1, 2), sent=True)
    whole_key, whole_value = (key.new_empty((key.shape[0], sum(buffers.lengths), *key.shape[2:])) for _ in range(2))
    whole_key[:, :place] = key  # the own ones first, then as they come
    torch.cat(values, 1, out=whole_value[:, :place])
    if beside is not None:
        beside.begin()
        beside.go_on()
    *weights, _, _ = norms
    with unbroken():
        for (cos, sin), given in inputs.come():
            keys, values = made(given)
            some = [index for index, part in enumerate(keys) if part.shape[1]]
            keys, key_weights = [keys[index] for index in some], [weights[parts + index] for index in some]
            span = slice(place, place := place + cos.shape[-2])
            whole_key[:, span] = norm_rotate_one(keys, key_weights, eps, cos, sin)
            torch.cat(values, 1, out=whole_value[:, span])
    return kernel(query, whole_key, whole_value, None, scale)


class _Inputs:
    """The inputs' way between the ranks, with the angles of their tokens, some tokens after the other. All memory is
    taken on the caller's stream before the first message, and held until the last was taken."""

    def __init__(
        self, layers: Projections, sent: list[Tensor], norms: list[Tensor], sizes: Sequence[Sequence[int]],
        buffers: HostBuffers,
    ):  # fmt: skip
        self._lengths, self._rank, self._sizes = buffers.lengths, buffers.rank, sizes
        self._exchange = Exchange(buffers.memory, buffers.rank, INPUTS)
        *_, cos, sin = norms
        # Of all tokens of a rank, or of those of a part: (tensor, part). Those of more bytes first, so that all begin
        # where their type can.
        self._given: list[tuple[Tensor, int | None]] = [(cos, None), (sin, None)]
        self._order = sorted(range(len(sent)), key=lambda index: -sent[index].itemsize)
        self._given += [(sent[index], layers.part_of[index]) for index in self._order]
        self._count = self._pieces_of(buffers)
        self._boxes = {
            source: [cos.new_empty(self._size(source, piece), dtype=torch.uint8) for piece in range(self._count)]
            for source in self._exchange.others
        }
        self._packed = []
        for piece in range(self._count):
            packed = torch.cat([_bytes(each) for each in self._of(piece)])
            self._packed.append((packed, self._exchange.mark()))

    def come(self) -> Iterator[tuple[list[Tensor], list[Tensor]]]:
        """Launch all messages; then angles and the layers' inputs of some of the others' tokens, in any order. What the
        caller computes from here on reads them."""
        self._travel()
        for message in range(self._count):
            self._exchange.take(message)
            for source in self._boxes:
                if self._boxes[source][message].numel():
                    cos, sin, *others = self._unpacked(source, message)
                    yield [cos, sin], [others[self._order.index(index)] for index in range(len(others))]

    def _travel(self) -> None:
        sent = 0
        for message in range(self._count):
            while sent < min(self._count, message + SLOTS):
                packed, ready = self._packed[sent]
                self._exchange.send(sent, dict.fromkeys(self._exchange.others, packed), ready)
                sent += 1
            self._exchange.receive(message, {source: boxes[message] for source, boxes in self._boxes.items()})

    def _pieces_of(self, buffers: HostBuffers) -> int:
        """How many: no more than are worth a message, no fewer than its room asks for. The same on all ranks."""
        longest = max(buffers.lengths)
        parts = len(self._sizes)
        of_token = [sum(_row(each) for each, part in self._given if part in (None, here)) for here in range(parts)]
        least = -(-longest // (buffers.memory.slots.room // max(of_token)))
        return max(1, least, min(_PIECES, longest, longest * max(of_token) // _LEAST_PIECE))

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


def _row(tensor: Tensor) -> int:
    """Bytes of a token, in all items of the batch."""
    return math.prod((*tensor.shape[:-2], tensor.shape[-1])) * tensor.itemsize


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(-1).view(torch.uint8)
