"""The linear layers that make queries, keys and values of a block's attention."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

QueriesKeysValues = tuple[list[Tensor], list[Tensor], list[Tensor]]
"""Queries, keys and values (batch, tokens of the part, heads, head dim) of each part of the own tokens."""


class Rounding(Protocol):
    """How a layer rounds its input, each token by itself; equal where the same comes of it."""

    def sent(self, x: Tensor) -> Tensor:
        """x (batch, tokens, width) rounded, as other ranks get it (batch, tokens, some width)."""

    def taken(self, sent: Tensor) -> Tensor:
        """What the layer computes with (batch, tokens, width), of what came."""


class Layer(Protocol):
    """A linear layer, of which some outputs can be computed; `rounding`: of its input, None where that is as it is."""

    @property
    def rounding(self) -> Rounding | None: ...

    def rows(self, first: int, size: int, rounded: bool = False) -> Callable[[Tensor], Tensor]:
        """The product with so many rows of the weight from one on, of x (batch, tokens, width), or of one `taken`."""


@dataclass(frozen=True)
class LinearLayer:
    """One of plain tensors, (outputs, width) and maybe (outputs,)."""

    weight: Tensor
    bias: Tensor | None = None
    rounding: Rounding | None = None

    def rows(self, first: int, size: int, rounded: bool = False) -> Callable[[Tensor], Tensor]:
        """As they lie there."""
        used = slice(first, first + size)
        weight, bias = self.weight[used], None if self.bias is None else self.bias[used]
        return lambda x: F.linear(x, weight, bias)


@dataclass(frozen=True)
class Projections:
    """What a block's attention is made of, which a block that is compiled has for it (acceleration/projection_pass.py).

    Args:
        inputs: (batch, tokens of a part, width).
        fed: of each layer, which of the inputs it takes.
        places: of queries, of keys and of values one after the other: layer and first row for each part of the tokens.
        dtype: of what the layers make.
        rounds: whether inputs are sent as layers round them.
    """

    inputs: Sequence[Tensor]
    fed: Sequence[int]
    layers: Sequence[Layer]
    places: Sequence[int]
    heads: int
    head_dim: int
    dtype: torch.dtype
    rounds: bool = True

    def whole(self) -> QueriesKeysValues:
        """With all heads, each layer one product."""
        queries, keys, values = self.of_all_heads((0, 1, 2))(self.inputs)
        return queries, keys, values

    def of_all_heads(
        self, kinds: Sequence[int], sent: bool = False
    ) -> Callable[[Sequence[Tensor]], list[list[Tensor]]]:
        """Of inputs such as these, or as they are `sent`, queries (0), keys (1) or values (2) with all heads, each
        layer one product."""
        size, parts = self.heads * self.head_dim, self.parts
        roundings = self.roundings if sent else [None] * len(self.inputs)
        runs: dict[int, tuple[int, int, Callable[[Tensor], Tensor]]] = {}  # the first row, how many, their product
        for index, layer in enumerate(self.layers):
            if rows := [part[kind][1] for part in parts for kind in kinds if part[kind][0] == index]:
                used = max(rows) + size - min(rows)
                runs[index] = min(rows), used, layer.rows(min(rows), used, roundings[self.fed[index]] is not None)

        def run(inputs: Sequence[Tensor]) -> list[list[Tensor]]:
            made: dict[int, Tensor] = {}
            inputs = [x if how is None else how.taken(x) for x, how in zip(inputs, roundings, strict=True)]
            for index, (_, used, rows) in runs.items():
                x = inputs[self.fed[index]]  # without a token where another part has all
                made[index] = rows(x) if x.shape[1] else x.new_empty((x.shape[0], 0, used), dtype=self.dtype)

            def heads(layer: int, first: int) -> Tensor:
                output = made[layer].narrow(2, first - runs[layer][0], size)
                return output.unflatten(2, (self.heads, self.head_dim))

            return [[heads(*part[kind]) for part in parts] for kind in kinds]

        return run

    def sent(self) -> list[Tensor]:
        """The inputs as other ranks get them."""
        return [x if how is None else how.sent(x) for x, how in zip(self.inputs, self.roundings, strict=True)]

    @property
    def roundings(self) -> list[Rounding | None]:
        """Of each input, where all layers that take it round it alike."""
        if not self.rounds:
            return [None] * len(self.inputs)
        found: list[set[Rounding | None]] = [set() for _ in self.inputs]
        for layer, index in zip(self.layers, self.fed, strict=True):
            found[index].add(layer.rounding)
        return [each.pop() if len(each) == 1 else None for each in found]

    @property
    def kind(self) -> str:
        """What inputs are, of any lengths, and what is made of them: not the same where ranks' layers differ."""
        inputs = [(str(x.dtype), x.shape[-1], how) for x, how in zip(self.inputs, self.roundings, strict=True)]
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
