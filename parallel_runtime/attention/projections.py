"""The linear layers that make queries, keys and values of a block's attention."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

QueriesKeysValues = tuple[list[Tensor], list[Tensor], list[Tensor]]
"""Queries, keys and values (batch, tokens of the part, heads, head dim) of each part of the own tokens."""
Rows = Callable[[Tensor], Tensor]
"""Of x (batch, tokens, width), (places, batch, tokens, size)."""


class Layer(Protocol):
    """A linear layer, of which some rows can be computed."""

    copies: ClassVar[bool]
    """These rows are copied for it."""

    def rows(self, firsts: Sequence[int], size: int) -> Rows:
        """The product with so many rows of the weight from each place on, which are as far from one another."""


@dataclass(frozen=True)
class LinearLayer:
    """One of plain tensors, (outputs, width) and maybe (outputs,)."""

    weight: Tensor
    bias: Tensor | None = None
    copies: ClassVar[bool] = False

    def rows(self, firsts: Sequence[int], size: int) -> Rows:
        """As one product of a batch: each by itself would be too narrow for a GPU."""
        used = slice(firsts[0], firsts[-1] + size)
        weight, bias = self.weight[used], None if self.bias is None else self.bias[used]
        if len(firsts) == 1:
            return lambda x: F.linear(x, weight, bias)[None]
        step = firsts[1] - firsts[0]
        weights = weight.unfold(0, size, step)  # (places, width, size)
        biases = None if bias is None else bias.unfold(0, size, step)[:, None]

        def run(x: Tensor) -> Tensor:
            tokens = x.flatten(0, 1).expand(len(firsts), -1, -1)
            made = torch.bmm(tokens, weights) if biases is None else torch.baddbmm(biases, tokens, weights)
            return made.unflatten(1, x.shape[:2])

        return run


@dataclass(frozen=True)
class Projections:
    """What a block's attention is made of, which a block that is compiled has for it (acceleration/projection_pass.py).

    Args:
        inputs: (batch, tokens of a part, width).
        fed: of each layer, which of the inputs it takes.
        places: of queries, of keys and of values one after the other: layer and first row for each part of the tokens.
        dtype: of what the layers make.
    """

    inputs: Sequence[Tensor]
    fed: Sequence[int]
    layers: Sequence[Layer]
    places: Sequence[int]
    heads: int
    head_dim: int
    dtype: torch.dtype

    def whole(self) -> QueriesKeysValues:
        """With all heads, each layer one product."""
        queries, keys, values = self.of_all_heads((0, 1, 2))(self.inputs)
        return queries, keys, values

    def of_all_heads(self, kinds: Sequence[int]) -> Callable[[Sequence[Tensor]], list[list[Tensor]]]:
        """Of inputs such as these, queries (0), keys (1) or values (2) with all heads, each layer one product."""
        size, parts = self.heads * self.head_dim, self.parts
        runs: dict[int, tuple[int, int, Rows]] = {}  # of each layer: the first row, how many, and their product
        for index, layer in enumerate(self.layers):
            if rows := [part[kind][1] for part in parts for kind in kinds if part[kind][0] == index]:
                used = max(rows) + size - min(rows)
                runs[index] = min(rows), used, layer.rows([min(rows)], used)

        def run(inputs: Sequence[Tensor]) -> list[list[Tensor]]:
            made: dict[int, Tensor] = {}
            for index, (_, used, rows) in runs.items():
                x = inputs[self.fed[index]]  # without a token where another part has all
                made[index] = rows(x)[0] if x.shape[1] else x.new_empty((x.shape[0], 0, used), dtype=self.dtype)

            def heads(layer: int, first: int) -> Tensor:
                output = made[layer].narrow(2, first - runs[layer][0], size)
                return output.unflatten(2, (self.heads, self.head_dim))

            return [[heads(*part[kind]) for part in parts] for kind in kinds]

        return run

    @property
    def like(self) -> Tensor:
        """A tensor of no number with batch, dtype and device of what the layers make."""
        return self.inputs[0].new_empty((self.inputs[0].shape[0], 0), dtype=self.dtype)

    @property
    def copies(self) -> bool:
        """Whether making some heads by themselves costs a copy of what makes them."""
        return any(layer.copies for layer in self.layers)

    @property
    def kind(self) -> str:
        """What inputs are, of any lengths, and what is made of them: not the same where ranks' layers differ."""
        inputs = [(str(x.dtype), x.shape[-1]) for x in self.inputs]
        return repr((inputs, self.fed, self.places, self.heads, self.head_dim, str(self.dtype)))

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
        self, ranks: Sequence[int], degree: int, start: int, stop: int
    ) -> Callable[[Sequence[Tensor]], QueriesKeysValues]:
        """Of inputs such as these, with some heads of those of some ranks, each of which has equally many: (ranks *
        batch, tokens of the part, stop - start, head dim)."""
        each, size = self.heads // degree * self.head_dim, (stop - start) * self.head_dim
        ways: list[tuple[int, tuple[int, ...], Rows]] = []  # the input, which of the three, and what makes them
        for part in self.parts:
            for kinds in _joined(part, self.heads * self.head_dim):
                layer = part[kinds[0]][0]
                firsts = [part[kind][1] + rank * each + start * self.head_dim for kind in kinds for rank in ranks]
                ways.append((self.fed[layer], kinds, self.layers[layer].rows(firsts, size)))

        def run(inputs: Sequence[Tensor]) -> QueriesKeysValues:
            made: QueriesKeysValues = [], [], []
            for fed, kinds, rows in ways:
                x = inputs[fed]
                if x.shape[1]:
                    products = rows(x).unflatten(0, (len(kinds), len(ranks)))
                else:  # another part has all the tokens
                    products = x.new_empty((len(kinds), len(ranks), *x.shape[:2], size), dtype=self.dtype)
                for kind, product in zip(kinds, products, strict=True):
                    made[kind].append(product.flatten(0, 1).unflatten(2, (stop - start, self.head_dim)))
            return made

        return run


def _joined(part: Sequence[tuple[int, int]], width: int) -> list[tuple[int, ...]]:
    """Which of queries, keys and values one product makes: those of one layer that lie there one after the other."""
    layer, first = part[0]
    together = list(part) == [(layer, first + kind * width) for kind in range(3)]
    return [(0, 1, 2)] if together else [(0,), (1,), (2,)]
