"""The linear layers that make queries, keys and values of a block's attention."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

Parts = tuple[list[Tensor], list[Tensor], list[Tensor]]
"""Queries, keys and values (batch, tokens of the part, heads, head dim) of each part of the own tokens."""


@dataclass(frozen=True)
class Projections:
    """What a block's attention is made of, which a block that is compiled has for it (acceleration/projection_pass.py).

    Args:
        inputs: (batch, tokens of a part, width) of each layer.
        weights: (outputs, width) of each layer.
        biases: (outputs,) of each layer, or None.
        places: of queries, of keys and of values one after the other: layer and first row for each part of the tokens.
    """

    inputs: Sequence[Tensor]
    weights: Sequence[Tensor]
    biases: Sequence[Tensor | None]
    places: Sequence[int]
    heads: int
    head_dim: int

    def whole(self) -> Parts:
        """With all heads, each layer one product."""
        made = [F.linear(*layer) for layer in zip(self.inputs, self.weights, self.biases, strict=True)]
        size = self.heads * self.head_dim
        queries, keys, values = (
            [made[layer][..., first : first + size].unflatten(2, (self.heads, self.head_dim)) for layer, first in part]
            for part in self._by_kind()
        )
        return queries, keys, values

    def of_heads(self, ranks: int, start: int, stop: int) -> Parts:
        """With some heads of each rank's: (ranks * batch, tokens of the part, stop - start, head dim)."""
        each, size = self.heads // ranks * self.head_dim, (stop - start) * self.head_dim
        made: Parts = [], [], []
        for part in zip(*self._by_kind(), strict=True):
            for kinds in _joined(part, self.heads * self.head_dim):
                layer = part[kinds[0]][0]
                firsts = [
                    part[kind][1] + rank * each + start * self.head_dim for kind in kinds for rank in range(ranks)
                ]
                products = self._products(layer, firsts, size)
                for kind, product in zip(kinds, products.unflatten(0, (len(kinds), ranks)), strict=True):
                    heads = product.unflatten(2, (-1, self.head_dim))
                    batch = self.inputs[layer].shape[0]
                    made[kind].append(heads.unflatten(1, (batch, heads.shape[1] // batch)).flatten(0, 1))
        return made

    def _by_kind(self) -> list[list[tuple[int, int]]]:
        """(layer, first row) of each part, of queries, keys and values."""
        pairs = list(zip(self.places[::2], self.places[1::2], strict=True))
        parts = len(pairs) // 3
        return [pairs[kind * parts : (kind + 1) * parts] for kind in range(3)]

    def _products(self, layer: int, firsts: Sequence[int], size: int) -> Tensor:
        """(places, rows of the input, size): with so many rows of the weight from each place on, which are as far from
        one another. As one product of a batch: each by itself would be too narrow for a GPU."""
        step = firsts[1] - firsts[0]
        rows = self.inputs[layer].flatten(0, 1).expand(len(firsts), -1, -1)
        used = slice(firsts[0], firsts[-1] + size)
        weights = self.weights[layer][used].unfold(0, size, step)  # (places, width, size)
        bias = self.biases[layer]
        if bias is None:
            return torch.bmm(rows, weights)
        return torch.baddbmm(bias[used].unfold(0, size, step)[:, None], rows, weights)


def _joined(part: Sequence[tuple[int, int]], width: int) -> list[tuple[int, ...]]:
    """Which of queries, keys and values one product makes: those of one layer that lie there one after the other."""
    layer, first = part[0]
    together = list(part) == [(layer, first + kind * width) for kind in range(3)]
    return [(0, 1, 2)] if together else [(0,), (1,), (2,)]
