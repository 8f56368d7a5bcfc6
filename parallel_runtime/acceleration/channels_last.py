"""What stands between the convolutions of a VAE or a U-Net, one pass over memory each, channels side by side.

Convolutions on GPUs want channels last. PyTorch's norms take several passes, its bias and its upsampling are slow in
that layout, and turning tensors between two layouts takes as long again: together half of a decoder's time. A norm and
the SiLU behind it are rounded once.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import nn

log = logging.getLogger(__name__)
_FORMATS = {4: torch.channels_last, 5: torch.channels_last_3d}
_HALF = (torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class PendingNorm:
    """A norm of `x` that waits to see whether SiLU follows: `write` (with SiLU) makes its result. None of the known
    VAEs uses it again, once SiLU has had it."""

    x: torch.Tensor
    result: torch.Tensor
    write: Callable[[bool], None]


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


def group_norm(
    x: torch.Tensor,
    groups: int,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    eps: float,
    add: Callable[[torch.Tensor], torch.Tensor],
    rows: int,
) -> PendingNorm:
    """Begin a group norm of a picture of so many rows; `add` sums over the ranks that have some of them."""
    from . import channels_last_kernels as kernels

    x, channels = arrange(x), x.shape[1]
    sums = add(kernels.channel_sums(x).unflatten(2, (groups, channels // groups)).sum(3))
    count = x[0].numel() // groups // x.shape[-2] * rows
    scale, shift = kernels.finish(sums, count, weight, bias, eps, channels)
    return _pending(x, kernels.scale_and_shift, scale, shift)


def add_bias(x: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    """Add a number to each channel of what a convolution made, where it is; PyTorch takes three times as long."""
    from . import channels_last_kernels as kernels

    if x.is_contiguous(memory_format=_FORMATS[x.ndim]):
        kernels.add_to_channels(x, bias)
        return x
    return x.add_(bias.reshape(-1, *(1,) * (x.ndim - 2)))


def doubled(x: torch.Tensor, size: Any, scale_factor: Any, mode: str) -> torch.Tensor | None:
    """What `interpolate` makes of pictures that become twice as high and wide by their nearest pixels; None: others."""
    from . import channels_last_kernels as kernels

    factors = scale_factor if isinstance(scale_factor, (tuple, list)) else (scale_factor,) * 2
    if x.ndim != 4 or size is not None or tuple(factors) != (2, 2) or mode not in ("nearest", "nearest-exact"):
        return None
    x = arrange(x)
    batch, channels, height, width = x.shape
    result = x.new_empty((batch, 2 * height, 2 * width, channels)).movedim(-1, 1)
    kernels.double(x, result)
    return result


def length_norm(x: torch.Tensor, scale: torch.Tensor) -> PendingNorm:
    """Begin what ComfyUI's code calls an RMS norm: each place's channels by their length, times sqrt(channels)."""
    from . import channels_last_kernels as kernels

    x = arrange(x)
    return _pending(x, kernels.divide_by_length, scale.flatten(), math.sqrt(x.shape[1]))


def length_norms(part: nn.Module) -> list[nn.Module]:
    """The modules of ComfyUI's that `length_norm` can stand for."""
    return [
        module
        for module in part.modules()
        if type(module).__name__ == "RMS_norm"
        and getattr(module, "channel_first", True)
        and getattr(module, "bias", None) is None
    ]


def _pending(x: torch.Tensor, kernel: Callable[..., None], *numbers: Any) -> PendingNorm:
    result = torch.empty_like(x)
    return PendingNorm(x, result, lambda silu: kernel(x, result, *numbers, silu=silu))
