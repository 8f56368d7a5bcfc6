"""The feed-forward layer beside attention (FLUX.1's single blocks), in parts that are computed while heads travel."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


class LayerBeside:
    """A layer over attended values and what a GELU (tanh) gives, in three steps, on the current stream.

    Made of the GELU's input x (batch, own tokens, width), weight and bias of the layer before it, and weight and bias
    of the layer over both."""

    def __init__(self, given: Sequence[Tensor]):
        self._x, self._hidden_weight, self._hidden_bias, weight, self._bias = given
        inner = self._hidden_weight.shape[0]
        self._of_attended, self._of_hidden = weight.t().split([weight.shape[1] - inner, inner])
        self._made: Tensor | None = None

    def begin(self) -> None:
        """What needs no attention: while queries, keys and values are on their way."""
        rows = self._x.reshape(-1, self._x.shape[-1])
        self._made = torch.ops.parallel_dit.linear_gelu.default(rows, self._hidden_weight, self._hidden_bias)

    def go_on(self) -> None:
        """Its share of the output: while attended values are."""
        assert self._made is not None
        self._made = torch.addmm(self._bias, self._made, self._of_hidden)

    def end(self, attended: Tensor) -> Tensor:
        """The output (batch, own tokens, width), with attended values (batch, own tokens, heads * head dim)."""
        assert self._made is not None
        self._made.addmm_(attended.reshape(-1, attended.shape[-1]), self._of_attended)
        return self._made.reshape(*self._x.shape[:-1], self._made.shape[-1])
