"""PyTorch's functions between the convolutions of a VAE or a U-Net, one pass over memory each, channels side by side.

Convolutions on GPUs want channels last. PyTorch's norms take several passes, its bias and its upsampling are slow in
that layout, and turning tensors between two layouts takes as long again: together half of a decoder's time. A norm and
the SiLU behind it are rounded once.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable, Mapping
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.overrides import TorchFunctionMode

log = logging.getLogger(__name__)
_FORMATS = {4: torch.channels_last, 5: torch.channels_last_3d}
_HALF = (torch.bfloat16, torch.float16)
NAMES: dict[Callable[..., Any], tuple[str, ...]] = {
    torch.conv2d: ("input", "weight", "bias", "stride", "padding", "dilation", "groups"),
    torch.conv3d: ("input", "weight", "bias", "stride", "padding", "dilation", "groups"),
    torch.cudnn_convolution: ("input", "weight", "padding", "stride", "dilation", "groups"),
    F.pad: ("input", "pad", "mode", "value"),
    F.interpolate: ("input", "size", "scale_factor", "mode", "align_corners", "recompute_scale_factor", "antialias"),
    F.group_norm: ("input", "num_groups", "weight", "bias", "eps"),
    torch.group_norm: ("input", "num_groups", "weight", "bias", "eps"),
    torch.Tensor.contiguous: ("input",),
}
"""Arguments in their order."""


@cache
def usable(device: torch.device) -> bool:
    """Whether the kernels run there; ranks agree on it, as sums of norms differ in shape."""
    if device.type != "cuda":
        return False
    try:
        from . import channels_last_kernels as kernels
    except ImportError:  # no Triton
        return False
    numbers = torch.zeros((1, 16, 4, 4), dtype=torch.float16, device=device)
    try:
        kernels.add_to_channels(arrange(numbers), numbers[0, :, 0, 0].contiguous())
    except kernels.FAILURES as error:
        log.info("VAEs run by PyTorch's functions alone, as Triton cannot compile: %s", error)
        return False
    return True


def takes(x: torch.Tensor) -> bool:
    """Whether the kernels know such a tensor; in float32, norms are computed as PyTorch does."""
    return x.is_cuda and x.dtype in _HALF and x.ndim in _FORMATS and x.numel() > 0


def arrange(x: torch.Tensor) -> torch.Tensor:
    """The same with a place's channels side by side in memory."""
    return x.contiguous(memory_format=_FORMATS[x.ndim])


def length_norms(part: nn.Module) -> list[nn.Module]:
    """The modules of ComfyUI's that `FusedFunctions.length_norm` can stand for."""
    found = [module for module in part.modules() if type(module).__name__ == "RMS_norm"]
    return [each for each in found if getattr(each, "channel_first", True) and getattr(each, "bias", None) is None]


class FusedFunctions(TorchFunctionMode):
    """Inside, norms, the SiLU behind them, biases of convolutions and doubled pixels are one pass over memory each;
    where the kernels may not be used (`fused`), all functions stay PyTorch's."""

    def __init__(self, fused: bool):
        super().__init__()
        self._fused = fused
        self._pending: tuple[torch.Tensor, torch.Tensor, Callable[[bool], None]] | None = None
        """A norm's input, its result, which waits to see whether SiLU follows, and what writes that (with SiLU). None
        of the known VAEs uses it again, once SiLU has had it."""
        self._known: dict[Callable[..., Any], Callable[..., Any]] = {
            torch.conv2d: self._convolve,
            torch.conv3d: self._convolve,
            F.group_norm: self._group_norm,
            F.interpolate: self._interpolate,
        }

    def __torch_function__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if self._pending is not None and _has((*args, *(kwargs or {}).values()), self._pending[:2]):
            _, result, _ = self._pending
            silu = function is F.silu and bool(args) and args[0] is result
            self._write(silu)
            if silu:
                return result
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
        return arrange(x) if self._takes(x) else x

    def _takes(self, x: torch.Tensor) -> bool:
        return self._fused and takes(x)

    def length_norm(self, module: Any, plain: Callable[..., torch.Tensor], x: torch.Tensor) -> torch.Tensor:
        """What ComfyUI's code calls an RMS norm: each place's channels by their length, times sqrt(channels) and the
        module's numbers; where no kernel takes x by the module's `plain` forward."""
        if not self._takes(x):
            return plain(x)
        from . import channels_last_kernels as kernels

        x, scale = arrange(x), module.gamma.to(x).flatten()
        return self._begin(x, kernels.divide_by_length, scale, math.sqrt(x.shape[1]))

    def _begin(self, x: torch.Tensor, kernel: Callable[..., None], *numbers: Any) -> torch.Tensor:
        """Let a norm wait for what comes next; nothing but what has its tensors can tell."""
        self._write(silu=False)
        result = torch.empty_like(x)
        self._pending = x, result, lambda silu: kernel(x, result, *numbers, silu=silu)
        return result

    def _write(self, silu: bool) -> None:
        pending, self._pending = self._pending, None
        if pending is not None:
            _, _, write = pending
            write(silu)

    def _interpolate(self, function: Any, given: dict[str, Any]) -> Any:
        """Pictures that become twice as high and wide by their nearest pixels are made by a kernel."""
        x, factors = given["input"], given.get("scale_factor")
        twice = (tuple(factors) if isinstance(factors, tuple | list) else (factors,) * 2) == (2, 2)
        nearest = given.get("size") is None and given.get("mode", "nearest") in ("nearest", "nearest-exact")
        if not self._takes(x) or x.ndim != 4 or not twice or not nearest:
            return function(**given)
        from . import channels_last_kernels as kernels

        batch, channels, height, width = x.shape
        result = x.new_empty((batch, 2 * height, 2 * width, channels)).movedim(-1, 1)
        kernels.double(arrange(x), result)
        return result

    def _convolve(self, function: Any, given: dict[str, Any]) -> Any:
        """The bias is added to what the convolution made, where that is: PyTorch takes three times as long."""
        bias = given.get("bias")
        if bias is None or not self._takes(given["input"]):
            return self._without_bias(function, given)
        from . import channels_last_kernels as kernels

        made = self._without_bias(function, given | {"bias": None})
        if not made.is_contiguous(memory_format=_FORMATS[made.ndim]):
            return made.add_(bias.reshape(-1, *(1,) * (made.ndim - 2)))
        kernels.add_to_channels(made, bias)
        return made

    def _without_bias(self, function: Any, given: dict[str, Any]) -> Any:
        return function(**given)

    def _group_norm(self, function: Any, given: dict[str, Any]) -> Any:
        x, groups = given["input"], given["num_groups"]
        if not self._takes(x):
            return function(**given)
        from . import channels_last_kernels as kernels

        x, channels = arrange(x), x.shape[1]
        sums = kernels.channel_sums(x).unflatten(2, (groups, channels // groups)).sum(3)
        sums, rows = self._of_all(sums, x.shape[-2])
        count = x[0].numel() // groups // x.shape[-2] * rows
        weight, bias, eps = given.get("weight"), given.get("bias"), given.get("eps", 1e-5)
        return self._begin(x, kernels.scale_and_shift, *kernels.finish(sums, count, weight, bias, eps, channels))

    def _of_all(self, sums: torch.Tensor, rows: int) -> tuple[torch.Tensor, int]:
        """Sums over all that have rows of the picture, and its rows, where so many are here."""
        return sums, rows


def _has(given: Iterable[Any], tensors: tuple[torch.Tensor, ...]) -> bool:
    """Whether a function was given one of these tensors, by itself or in a list."""
    return any(
        _has(each, tensors) if isinstance(each, list | tuple) else any(each is tensor for tensor in tensors)
        for each in given
    )
