"""Layers of the pack ComfyUI-GGUF whose weights a kernel of ours makes numbers of: the pack's, bit for bit. In a
graph one operator over plain bytes. Where there is no kernel (on a CPU, rarer types) the pack's own function
computes; a weight with patches beside it is left to the pack's layer."""

from __future__ import annotations

import importlib
import operator
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from ..attention import operators
from ..patching.comfyui_patches import is_quantised
from ..switches import is_on
from .quantised_layers import become, own_class

_FUNCTIONS: dict[str, Callable[[torch.Tensor, tuple[int, int]], torch.Tensor]] = {}  # the pack's own, by scheme


class GgufLayer(nn.Module):
    """A linear layer becomes one by its class alone, of which the pack's stays a base."""

    stored: torch.Tensor | None = None  # bytes of its weight, numbers without a scheme; None: the pack's layer computes
    added: torch.Tensor | None = None
    scheme = ""
    rows = columns = 0
    _seen: tuple[Any, ...] = ()

    def forward(self, input: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        """As the pack's."""
        if not torch.compiler.is_compiling():
            self.look_inside()
        if self.stored is None or args or kwargs:
            return super().forward(input, *args, **kwargs)
        if self.scheme:
            make = torch.ops.parallel_dit.gguf_weight.default
            weight = make(self.stored, self.scheme, self.rows, self.columns, input.dtype)
        else:
            weight = self.stored.to(input.dtype)
        return F.linear(input, weight, None if self.added is None else self.added.to(input.dtype))

    def look_inside(self) -> None:
        """Take note of what the parameters are now; before a graph is called."""
        weight: Any = self._parameters["weight"]
        bias: Any = self._parameters["bias"]
        seen = (weight, bias), tuple(each.data_ptr() for each in (weight, bias) if each is not None)
        if self._seen and all(map(operator.is_, seen[0], self._seen[0])) and seen[1] == self._seen[1]:
            return
        self._seen = seen
        self.stored = None
        if getattr(weight, "patches", None) or getattr(bias, "patches", None) or is_quantised(bias):
            return
        self.rows, self.columns = map(int, getattr(weight, "tensor_shape", weight.shape))
        self.scheme = _scheme(own_class(self, GgufLayer), weight.tensor_type) if is_quantised(weight) else ""
        self.added = None if bias is None else _plain(bias)
        self.stored = _plain(weight)


def use_gguf_kernels(network: nn.Module) -> None:
    """Have layers of the pack compute by operators of ours."""
    for module in network.modules() if is_on("quantised") else ():
        of_pack = isinstance(module, nn.Linear) and hasattr(module, "is_ggml_quantized")
        if of_pack and getattr(module, "dequant_dtype", None) is None:  # its weight is not cast to another type first
            become(module, GgufLayer)


def _plain(weight: torch.Tensor) -> torch.Tensor:
    """The same memory without the pack's class."""
    with torch._C.DisableTorchFunctionSubclass():
        return weight.detach().as_subclass(torch.Tensor)


def _scheme(layer: Any, kind: Any) -> str:
    """A name for the type and for the pack that has functions for it."""
    package = layer.__module__.rpartition(".")[0]
    scheme = f"{package}:{kind.name}"
    if scheme not in _FUNCTIONS:
        dequantize = importlib.import_module(f"{package}.dequant").dequantize
        _FUNCTIONS[scheme] = lambda stored, shape: dequantize(stored, kind, shape)
    return scheme


@operators.operator("gguf_weight", "(Tensor stored, str scheme, int rows, int columns, ScalarType dtype) -> Tensor")
def gguf_weight(stored: torch.Tensor, scheme: str, rows: int, columns: int, dtype: torch.dtype) -> torch.Tensor:
    """The numbers of a weight, (rows, columns), as the pack makes them: in float16, then of the type."""
    if stored.device.type == "cuda":
        from .gguf_kernel import LAYOUTS, dequantise

        if (kind := scheme.rpartition(":")[2]) in LAYOUTS:
            return dequantise(stored, kind, rows, columns, dtype)
    return _FUNCTIONS[scheme](stored, (rows, columns)).to(dtype).contiguous()


@operators.shapes_of(gguf_weight)
def _(stored: torch.Tensor, scheme: str, rows: int, columns: int, dtype: torch.dtype) -> torch.Tensor:
    return stored.new_empty((rows, columns), dtype=dtype)
