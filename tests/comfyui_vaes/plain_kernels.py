"""What parallel_runtime/acceleration/channels_last_kernels.py computes, by PyTorch's functions, on any device."""

from __future__ import annotations

from collections import Counter

import torch
import torch.nn.functional as F

calls: Counter[tuple[str, bool]] = Counter()
"""Of the functions that write, by name and whether with SiLU."""


def channel_sums(x: torch.Tensor) -> torch.Tensor:
    """Sums of numbers and of squares."""
    numbers = x.double().flatten(2)
    return torch.stack((numbers.sum(2), (numbers * numbers).sum(2)))


def finish(
    sums: torch.Tensor, count: int, weight: torch.Tensor | None, bias: torch.Tensor | None, eps: float, channels: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Scale and shift of a group norm."""
    mean, square = sums / count
    scale, mean = (
        each.repeat_interleave(channels // sums.shape[2], 1) for each in ((square - mean * mean + eps).rsqrt(), mean)
    )
    scale = scale * (1 if weight is None else weight)
    shift = (0 if bias is None else bias) - mean * scale
    return scale.float(), shift.float()


def add_to_channels(x: torch.Tensor, bias: torch.Tensor) -> None:
    """Where it is."""
    calls["bias", False] += 1
    x += bias.reshape(-1, *(1,) * (x.ndim - 2))


def scale_and_shift(
    x: torch.Tensor, target: torch.Tensor, scale: torch.Tensor, shift: torch.Tensor, silu: bool
) -> None:
    """Times and plus a number for each channel."""
    calls["scale", silu] += 1
    ones = (1,) * (x.ndim - 2)
    numbers = x.float() * scale.reshape(*scale.shape, *ones) + shift.reshape(*shift.shape, *ones)
    target.copy_(F.silu(numbers) if silu else numbers)


def divide_by_length(x: torch.Tensor, target: torch.Tensor, scale: torch.Tensor, factor: float, silu: bool) -> None:
    """By the length of each place's channels."""
    calls["length", silu] += 1
    numbers = F.normalize(x.float(), dim=1) * scale.float().reshape(-1, *(1,) * (x.ndim - 2)) * factor
    target.copy_(F.silu(numbers) if silu else numbers)


def double(x: torch.Tensor, target: torch.Tensor) -> None:
    """Each pixel four times."""
    calls["double", False] += 1
    target.copy_(x.repeat_interleave(2, 2).repeat_interleave(2, 3))
