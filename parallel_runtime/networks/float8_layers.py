"""Layers of float8 as operators of a graph, whose input is rounded before them, and some rows of one."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from ..attention import operators
from .quantised_layers import KINDS, scale_of, some_rows, whole_products


@operators.operator("float8_layer", "(Tensor x, Tensor[] inside, str kind, ScalarType dtype) -> Tensor")
def float8_layer(x: torch.Tensor, inside: list[torch.Tensor], kind: str, dtype: torch.dtype) -> torch.Tensor:
    """What ComfyUI's layer gives, of an input that is float8 already, as that would round it from `dtype`."""
    return _of_float8(x, KINDS[kind].filled(inside), dtype)


@operators.shapes_of(float8_layer)
def _(x: torch.Tensor, inside: list[torch.Tensor], kind: str, dtype: torch.dtype) -> torch.Tensor:
    return x.new_empty((*x.shape[:-1], KINDS[kind].outputs), dtype=dtype)


@operators.operator(
    "float8_rows", "(Tensor x, Tensor[] inside, str kind, ScalarType dtype, int first, int size) -> Tensor"
)
def float8_rows(
    x: torch.Tensor, inside: list[torch.Tensor], kind: str, dtype: torch.dtype, first: int, size: int
) -> torch.Tensor:
    """The same with so many rows of the weight, from one on: a part of the output (acceleration/passes.py)."""
    return Float8Layer(inside, kind, dtype).rows(first, size)(x)


@operators.shapes_of(float8_rows)
def _(x: torch.Tensor, inside: Any, kind: str, dtype: torch.dtype, first: int, size: int) -> torch.Tensor:
    return x.new_empty((*x.shape[:-1], size), dtype=dtype)


@dataclass(frozen=True)
class Float8Layer:
    """A `Layer` (attention/projections.py) of float8, whose input is float8 already; arguments as above."""

    inside: list[torch.Tensor]
    kind: str
    dtype: torch.dtype
    rounding: None = None  # what it is given is rounded

    def rows(self, first: int, size: int, rounded: bool = False) -> Callable[[torch.Tensor], torch.Tensor]:
        """As they lie there."""
        layer = some_rows(KINDS[self.kind].filled(self.inside), first, size)
        return lambda x: _of_float8(x, layer, self.dtype)


def _of_float8(x: torch.Tensor, layer: Any, dtype: torch.dtype) -> torch.Tensor:
    scale = scale_of(layer)
    given = _like(layer.weight, x.reshape(-1, x.shape[-1]), _one(x.device) if scale is None else scale, dtype)
    with whole_products():
        output: torch.Tensor = layer.forward_comfy_cast_weights(given, dtype, want_requant=True)
    return output.reshape(*x.shape[:-1], output.shape[-1]).contiguous()


def _like(weight: Any, numbers: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype) -> Any:
    """A quantised tensor as a weight is, of other numbers."""
    params = type(weight._params)(scale=scale, orig_dtype=dtype, orig_shape=tuple(numbers.shape))
    return type(weight)(numbers, weight._layout_cls, params)


@functools.cache
def _one(device: torch.device) -> torch.Tensor:
    return torch.ones((), device=device, dtype=torch.float32)
