"""PyTorch's functions between a network's convolutions, by the kernels of channels_last.py: what its forward calls,
unchanged."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode

from . import channels_last
from .channels_last import PendingNorm

NAMES: dict[Callable[..., Any], tuple[str, ...]] = {
    torch.conv2d: ("input", "weight", "bias", "stride", "padding", "dilation", "groups"),
    torch.conv3d: ("input", "weight", "bias", "stride", "padding", "dilation", "groups"),
    torch.cudnn_convolution: ("input", "weight", "padding", "stride", "dilation", "groups"),
    F.pad: ("input", "pad", "mode", "value"),
    F.interpolate: (
        "input", "size", "scale_factor", "mode", "align_corners", "recompute_scale_factor", "antialias",
    ),
    F.group_norm: ("input", "num_groups", "weight", "bias", "eps"),
    torch.group_norm: ("input", "num_groups", "weight", "bias", "eps"),
    torch.Tensor.contiguous: ("input",),
}  # fmt: skip
"""Arguments in their order."""


class FusedFunctions(TorchFunctionMode):
    """Inside, norms, the SiLU behind them, biases of convolutions and doubled pixels are one pass over memory each.

    Args:
        fused: whether the kernels may be used; else all functions stay PyTorch's.
    """

    def __init__(self, fused: bool):
        super().__init__()
        self._fused = fused
        self._pending: PendingNorm | None = None
        self._known: dict[Callable[..., Any], Callable[..., Any]] = {
            torch.conv2d: self._convolve,
            torch.conv3d: self._convolve,
            F.group_norm: self._group_norm,
            F.interpolate: self._interpolate,
        }

    def __torch_function__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        pending = self._pending
        if pending is not None and _has((*args, *(kwargs or {}).values()), (pending.x, pending.result)):
            silu = function is F.silu and bool(args) and args[0] is pending.result
            self._write(silu)
            if silu:
                return pending.result
        given = dict(kwargs or {})
        known = self._known.get(function)
        if known is None:
            return function(*args, **given)
        return known(function, dict(zip(NAMES[function], args, strict=False)) | given)

    def __exit__(self, *exception: Any) -> None:
        super().__exit__(*exception)
        if exception[0] is None:
            self._write(silu=False)

    def arranged(self, x: torch.Tensor) -> torch.Tensor:
        """What the network is given, as it should lie in memory."""
        return channels_last.arrange(x) if self._takes(x) else x

    def _takes(self, x: torch.Tensor) -> bool:
        return self._fused and channels_last.takes(x)

    def _begin(self, pending: PendingNorm) -> torch.Tensor:
        """Let a norm wait for what comes next; nothing but what has its tensors can tell."""
        self._write(silu=False)
        self._pending = pending
        return pending.result

    def _write(self, silu: bool) -> None:
        pending, self._pending = self._pending, None
        if pending is not None:
            pending.write(silu)

    def _interpolate(self, function: Any, given: dict[str, Any]) -> torch.Tensor:
        x, made = given["input"], None
        if self._takes(x):
            made = channels_last.doubled(x, given.get("size"), given.get("scale_factor"), given.get("mode", "nearest"))
        return made if made is not None else function(**given)

    def _convolve(self, function: Any, given: dict[str, Any]) -> torch.Tensor:
        """The bias is added apart where that is faster."""
        bias = given.get("bias")
        if bias is None or not self._takes(given["input"]):
            return self._without_bias(function, given)
        return channels_last.add_bias(self._without_bias(function, given | {"bias": None}), bias)

    def _without_bias(self, function: Any, given: dict[str, Any]) -> Any:
        return function(**given)

    def _group_norm(self, function: Any, given: dict[str, Any]) -> torch.Tensor:
        x = given["input"]
        if not self._takes(x):
            return self._plain_norm(function, given)
        weight, bias, eps = given.get("weight"), given.get("bias"), given.get("eps", 1e-5)
        return self._begin(
            channels_last.group_norm(x, given["num_groups"], weight, bias, eps, self._sum, self._all_rows(x.shape[-2]))
        )

    def _plain_norm(self, function: Any, given: dict[str, Any]) -> torch.Tensor:
        made: torch.Tensor = function(**given)
        return made

    def _sum(self, numbers: torch.Tensor) -> torch.Tensor:
        """Over all that have rows of the picture."""
        return numbers

    def _all_rows(self, own: int) -> int:
        """Rows of the whole picture, where so many are here."""
        return own


def _has(given: Iterable[Any], tensors: tuple[torch.Tensor, ...]) -> bool:
    """Whether a function was given one of these tensors, by itself or in a list."""
    for each in given:
        if isinstance(each, (list, tuple)):
            if _has(each, tensors):
                return True
        elif any(each is tensor for tensor in tensors):
            return True
    return False
