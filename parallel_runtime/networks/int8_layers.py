"""Some rows of int8 layers, which round their input token by token: it may be that of another rank's tokens, and comes
from there in int8."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from ..attention import operators
from .quantised_layers import KINDS, some_rows, whole_products

_SCALE = 4  # bytes of a token's scale, float32


@operators.operator("int8_rows", "(Tensor x, Tensor[] inside, str kind, int first, int size) -> Tensor")
def int8_rows(x: torch.Tensor, inside: list[torch.Tensor], kind: str, first: int, size: int) -> torch.Tensor:
    """What ComfyUI's layer gives with so many rows of its weight, from one on (acceleration/passes.py)."""
    return Int8Layer(inside, kind, x.dtype).rows(first, size)(x)


@operators.shapes_of(int8_rows)
def _(x: torch.Tensor, inside: Any, kind: str, first: int, size: int) -> torch.Tensor:
    return x.new_empty((*x.shape[:-1], size))


@dataclass(frozen=True)
class Int8Rounding:
    """To 127 of a token's largest number, after a rotation of so many numbers each, or none (ConvRot, as ComfyUI's
    TensorWiseINT8Layout)."""

    group: int

    def sent(self, x: torch.Tensor) -> torch.Tensor:
        """The integers (batch, tokens, width), and behind them the four bytes of their scale."""
        tokens = x.reshape(-1, x.shape[-1])
        if not len(tokens):
            return x.new_empty((*x.shape[:-1], x.shape[-1] + _SCALE), dtype=torch.int8)
        if self.group:  # as a weight is rotated
            how: dict[str, Any] = {"per_channel": True, "convrot": True, "convrot_groupsize": self.group}
        else:
            how = {"is_weight": False}
        numbers, params = _layout().quantize(tokens, **how)
        scale = params.scale.view(-1, 1).view(torch.int8)
        return torch.cat([numbers, scale], 1).view(*x.shape[:-1], -1)

    def taken(self, sent: torch.Tensor) -> torch.Tensor:
        """Integers times scale in float32, which round to themselves."""
        numbers, scale = sent.split([sent.shape[-1] - _SCALE, _SCALE], -1)
        return numbers * scale.contiguous().view(torch.float32)


@dataclass(frozen=True)
class Int8Layer:
    """A `Layer` (attention/projections.py) of int8; arguments as of the operator `quantised_layer`; `dtype`: of what
    it gives."""

    inside: list[torch.Tensor]
    kind: str
    dtype: torch.dtype

    @property
    def rounding(self) -> Int8Rounding:
        """As its weight was rotated."""
        params = KINDS[self.kind].filled(self.inside).weight._params
        return Int8Rounding(params.convrot_groupsize if params.convrot else 0)

    def rows(self, first: int, size: int, rounded: bool = False) -> Callable[[torch.Tensor], torch.Tensor]:
        """As they lie there."""
        emptied = KINDS[self.kind]
        layer = some_rows(emptied.filled(self.inside), first, size)

        def run(x: torch.Tensor) -> torch.Tensor:
            with whole_products():
                output: torch.Tensor = emptied.own.forward(layer, x)
            return output.contiguous()

        def run_rounded(x: torch.Tensor) -> torch.Tensor:
            from comfy.quant_ops import ck

            bias = None if layer.bias is None else layer.bias.to(self.dtype)
            output: torch.Tensor = ck.int8_linear(x, *_layout().get_plain_tensors(layer.weight), bias, self.dtype)
            return output

        return run_rounded if rounded else run


def _layout() -> Any:
    from comfy.quant_ops import TensorWiseINT8Layout

    return TensorWiseINT8Layout
