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
        inputs: (batch, tokens of a part, width).
        fed: of each layer, which of the inputs it takes.
        weights: (outputs, width) of each layer.
        biases: (outputs,) of each layer, or None.
        places: of queries, of keys and of values one after the other: layer and first row for each part of the tokens.
    """

    inputs: Sequence[Tensor]
    fed: Sequence[int]
    weights: Sequence[Tensor]
    biases: Sequence[Tensor | None]
    places: Sequence[int]
    heads: int
    head_dim: int

    def whole(self) -> Parts:
        """With all heads, each layer one product."""
        given = [self.inputs[index] for index in self.fed]
        made = [F.linear(*layer) for layer in zip(given, self.weights, self.biases, strict=True)]
        size = self.heads * self.head_dim
        queries, keys, values = (
            [made[layer][..., first : first + size].unflatten(2, (self.heads, self.head_dim)) for layer, first in part]
            for part in zip(*self.parts, strict=True)
        )
        return queries, keys, values

    @property
    def like(self) -> Tensor:
        """A tensor of no number with batch, dtype and device of what the layers make."""
        return self.inputs[0].new_empty((self.inputs[0].shape[0], 0))

    @property
    def lengths(self) -> list[int]:
        """Tokens of each part."""
        return [self.inputs[self.fed[part[0][0]]].shape[1] for part in self.parts]

    @property
    def part_of(self) -> list[int]:
        """Of each input, which part of the tokens it is of."""
        fed = {self.fed[layer]: index for index, part in enumerate(self.parts) for layer, _ in part}
        return [fed[index] for index in range(len(self.inputs))]

    @property
    def parts(self) -> list[list[tuple[int, int]]]:
        """(layer, first row) of queries, of keys and of values, for each part of the tokens."""
        pairs = list(zip(self.places[::2], self.places[1::2], strict=True))
        return [pairs[part :: len(pairs) // 3] for part in range(len(pairs) // 3)]

    def of_heads(
        self, ranks: Sequence[int], degree: int, start: int, stop: int, inputs: Sequence[Tensor] | None = None
    ) -> Parts:
        """With some heads of those of some ranks, each of which has equally many: (ranks * batch, tokens of the part,
        stop - start, head dim); of these inputs, where others are given."""
        given = self.inputs if inputs is None else inputs
        each, size = self.heads // degree * self.head_dim, (stop - start) * self.head_dim
        made: Parts = [], [], []
        for part in self.parts:
            for kinds in _joined(part, self.heads * self.head_dim):
                layer = part[kinds[0]][0]
                x = given[self.fed[layer]]
                firsts = [part[kind][1] + rank * each + start * self.head_dim for kind in kinds for rank in ranks]
                products = self._products(layer, x, firsts, size).unflatten(0, (len(kinds), len(ranks)))
                for kind, product in zip(kinds, products, strict=True):  # (ranks, rows of the input, size)
                    made[kind].append(product.view(len(ranks) * x.shape[0], x.shape[1], stop - start, self.head_dim))
        return made

    def _products(self, layer: int, x: Tensor, firsts: Sequence[int], size: int) -> Tensor:
        """(places, rows of the input, size): with so many rows of the weight from each place on, which are as far from
        one another. As one product of a batch: each by itself would be too narrow for a GPU."""
        step = firsts[1] - firsts[0] if len(firsts) > 1 else size
        rows = x.flatten(0, 1).expand(len(firsts), -1, -1)
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
