"""A norm of a VAE and the SiLU behind it as one pass over memory, channels last, as convolutions on GPUs want them.

Half of a decoder's time goes to norms by several passes and to turning tensors between layouts. Here a norm gives its
result with a place's channels side by side; what follows keeps that, up to the next norm. Numbers are rounded once.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

_FORMATS = {4: torch.channels_last, 5: torch.channels_last_3d}
_HALF = (torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class PendingNorm:
    """A norm that waits to see whether SiLU follows.

    Args:
        x: what it is of.
        result: not written yet.
        write: (with SiLU) -> None.
    """

    x: torch.Tensor
    result: torch.Tensor
    write: Callable[[bool], None]


def takes(x: torch.Tensor) -> bool:
    """Whether the kernels know such a tensor; in float32, norms are computed as PyTorch does."""
    return x.is_cuda and x.dtype in _HALF and x.ndim in _FORMATS and x.numel() > 0


def channels_last(x: torch.Tensor) -> torch.Tensor:
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
    """Begin a group norm.

    Args:
        add: sum over the ranks that have the picture's other rows.
        rows: of all of them.
    """
    from . import norm_kernels as kernels

    x, channels = channels_last(x), x.shape[1]
    sums = add(kernels.channel_sums(x).unflatten(2, (groups, channels // groups)).sum(3))
    count = x[0].numel() // groups // x.shape[-2] * rows
    scale, shift = kernels.finish(sums, count, weight, bias, eps, channels)
    return _pending(x, kernels.scale_and_shift, scale, shift)


def add_bias(x: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    """Add a number to each channel of what a convolution made, where it is; PyTorch takes three times as long."""
    from . import norm_kernels as kernels

    if x.is_contiguous(memory_format=_FORMATS[x.ndim]):
        kernels.add_to_channels(x, bias)
        return x
    return x.add_(bias.reshape(-1, *(1,) * (x.ndim - 2)))


def length_norm(x: torch.Tensor, scale: torch.Tensor) -> PendingNorm:
    """Begin what ComfyUI's code calls an RMS norm: each place's channels by their length, times sqrt(channels)."""
    from . import norm_kernels as kernels

    x = channels_last(x)
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
