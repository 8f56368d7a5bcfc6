"""The feed-forward layer beside attention (FLUX's single blocks), in parts that are computed while heads travel."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


class LayerBeside:
    """A layer over attended values and hidden ones, in three steps, on the current stream.

    Made of what the hidden values come from, x (batch, own tokens, width), of weight and bias of the layer before a
    GELU (tanh), and of weight and bias of the layer over both (FLUX.1); or of x and both weights, without biases, where
    a SiLU of one half of the hidden values is the gate of the other (FLUX.2)."""

    def __init__(self, given: Sequence[Tensor]):
        self._x, self._of_x, *others = given
        self._hidden_bias: Tensor | None = None
        self.bias: Tensor | None = None
        if len(others) == 1:
            (self.weight,) = others
        else:
            self._hidden_bias, self.weight, self.bias = others
        self._made: Tensor | None = None

    @property
    def parameters(self) -> int:
        """Of its weights, that every token is multiplied with: those before attention is there."""
        inner = self._of_x.shape[0] // (2 if self._hidden_bias is None else 1)
        return self._of_x.numel() + self.weight.shape[0] * inner

    def hidden(self) -> Tensor:
        """(batch, own tokens, inner width)."""
        ours = torch.ops.parallel_dit
        if self._hidden_bias is None:
            return ours.linear_silu_gate.default(self._x, self._of_x)
        return ours.linear_gelu.default(self._x, self._of_x, self._hidden_bias)

    def begin(self) -> None:
        """What needs no attention: while queries, keys and values are on their way."""
        self._made = self.hidden()

    def go_on(self) -> None:
        """Its share of the output: while attended values are."""
        assert self._made is not None
        rows = self._made.flatten(0, 1)
        of_hidden = self.weight[:, -rows.shape[1] :].t()
        self._made = torch.mm(rows, of_hidden) if self.bias is None else torch.addmm(self.bias, rows, of_hidden)

    def end(self, attended: Tensor) -> Tensor:
        """The output (batch, own tokens, width), with attended values (batch, own tokens, heads * head dim)."""
        assert self._made is not None
        rows = attended.flatten(0, 1)
        self._made.addmm_(rows, self.weight[:, : rows.shape[1]].t())
        return self._made.unflatten(0, attended.shape[:2])
