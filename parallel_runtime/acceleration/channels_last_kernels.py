"""The kernels of channels_last.py, in Triton, which comes with PyTorch's CUDA builds.

Tensors are (batch, channels, ...), a place's channels side by side in memory. A tile has some places and some channels,
of one size for every number of channels, so that one compilation serves all layers of a network.
"""

from __future__ import annotations

import subprocess

import torch
import triton
import triton.language as tl
from triton.errors import TritonError

FAILURES = (TritonError, RuntimeError, AssertionError, AttributeError, OSError, ValueError, subprocess.SubprocessError)
"""What Triton raises where it cannot compile: there is no C compiler, or the GPU is too old."""
_NUMBERS = 8192
"""Of a tile."""
_SUMMED = 4096
"""Of one whose sums stay in registers beside it."""
_TILES = 4
"""Whose sums a program adds up in float32."""
_CHANNELS = 64
"""Of a tile, where what becomes of a channel does not depend on the others."""


@triton.jit
def _sum(source, target, places, channels, PLACES: tl.constexpr, WIDE: tl.constexpr, TILES: tl.constexpr):
    """Program (part of the places, batch item, some channels): sums of each channel's numbers and of their squares."""
    part, item = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    channel = tl.program_id(2) * WIDE + tl.arange(0, WIDE)
    sums = tl.zeros((PLACES, WIDE), tl.float32)
    squares = tl.zeros((PLACES, WIDE), tl.float32)
    for tile in range(TILES):
        place = (part * TILES + tile) * PLACES + tl.arange(0, PLACES)
        inside = (place < places)[:, None] & (channel < channels)[None, :]
        at = (item * places + place)[:, None] * channels + channel[None, :]
        x = tl.load(source + at, mask=inside, other=0.0).to(tl.float32)
        sums += x
        squares += x * x
    at = (item * tl.num_programs(0) + part) * 2 * channels + channel
    tl.store(target + at, tl.sum(sums, 0), mask=channel < channels)
    tl.store(target + at + channels, tl.sum(squares, 0), mask=channel < channels)


@triton.jit
def _finish(
    sums, weight, bias, scale, shift, channels, groups, count, eps, WEIGHT: tl.constexpr, BIAS: tl.constexpr,
    WIDE: tl.constexpr,
):  # fmt: skip
    """Program (batch item, some channels): a group's sums as its channels' scale and shift."""
    item = tl.program_id(0)
    channel = tl.program_id(1) * WIDE + tl.arange(0, WIDE)
    real = channel < channels
    at = item * groups + channel * groups // channels
    mean = tl.load(sums + at, mask=real, other=0.0) / count
    square = tl.load(sums + tl.num_programs(0) * groups + at, mask=real, other=0.0) / count
    # No less than nothing, however it was rounded.
    made = 1 / tl.sqrt(tl.maximum(square - mean * mean, 0.0) + eps)
    if WEIGHT:
        made = made * tl.load(weight + channel, mask=real, other=0.0)
    moved = -mean * made
    if BIAS:
        moved = moved + tl.load(bias + channel, mask=real, other=0.0)
    tl.store(scale + item * channels + channel, made.to(tl.float32), mask=real)
    tl.store(shift + item * channels + channel, moved.to(tl.float32), mask=real)


@triton.jit
def _scale(
    source, scale, shift, target, places, channels, factor, each, LENGTH: tl.constexpr, SCALE: tl.constexpr,
    SHIFT: tl.constexpr, SILU: tl.constexpr, PLACES: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """Program (some places, batch item, some channels); `each` is 0 where all items have one scale and one shift."""
    item = tl.program_id(1).to(tl.int64)
    place = tl.program_id(0).to(tl.int64) * PLACES + tl.arange(0, PLACES)
    channel = tl.program_id(2) * WIDE + tl.arange(0, WIDE)
    real = channel < channels
    inside = (place < places)[:, None] & real[None, :]
    at = (item * places + place)[:, None] * channels + channel[None, :]
    x = tl.load(source + at, mask=inside, other=0.0).to(tl.float32)
    if LENGTH:
        x = x * (tl.rsqrt(tl.maximum(tl.sum(x * x, 1), 1e-24)) * factor)[:, None]
    if SCALE:
        x = x * tl.load(scale + item * each + channel, mask=real, other=0.0).to(tl.float32)[None, :]
    if SHIFT:
        x = x + tl.load(shift + item * each + channel, mask=real, other=0.0).to(tl.float32)[None, :]
    if SILU:
        x = x * tl.sigmoid(x)
    tl.store(target + at, x.to(target.dtype.element_ty), mask=inside)


@triton.jit
def _double(source, target, width, places, channels, PLACES: tl.constexpr, WIDE: tl.constexpr):
    """Program (some of the result's places, picture, some channels)."""
    item = tl.program_id(1).to(tl.int64)
    place = tl.program_id(0).to(tl.int64) * PLACES + tl.arange(0, PLACES)
    channel = tl.program_id(2) * WIDE + tl.arange(0, WIDE)
    inside = (place < places)[:, None] & (channel < channels)[None, :]
    row, column = place // (2 * width), place % (2 * width)
    nearest = item * (places // 4) + row // 2 * width + column // 2
    x = tl.load(source + nearest[:, None] * channels + channel[None, :], mask=inside)
    tl.store(target + (item * places + place)[:, None] * channels + channel[None, :], x, mask=inside)


def channel_sums(x: torch.Tensor) -> torch.Tensor:
    """(2, batch, channels) in float64: sums of the numbers, and of their squares."""
    batch, channels, places, wide, tile = _sizes(x, _CHANNELS, _SUMMED)
    parts = triton.cdiv(places, tile * _TILES)
    sums = torch.empty((batch, parts, 2, channels), dtype=torch.float32, device=x.device)
    _sum[(parts, batch, triton.cdiv(channels, wide))](x, sums, places, channels, PLACES=tile, WIDE=wide, TILES=_TILES)
    return sums.sum(1, dtype=torch.float64).transpose(0, 1)


def finish(
    sums: torch.Tensor, count: int, weight: torch.Tensor | None, bias: torch.Tensor | None, eps: float, channels: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """A group norm's scale and shift, (batch, channels) in float32, of the sums (2, batch, groups) of `count` numbers
    each."""
    _, batch, groups = sums.shape
    scale, shift = torch.empty((2, batch, channels), dtype=torch.float32, device=sums.device)
    _finish[(batch, triton.cdiv(channels, _CHANNELS))](
        sums, weight, bias, scale, shift, channels, groups, float(count), eps, WEIGHT=weight is not None,
        BIAS=bias is not None, WIDE=_CHANNELS,
    )  # fmt: skip
    return scale, shift


def scale_and_shift(
    x: torch.Tensor, target: torch.Tensor, scale: torch.Tensor, shift: torch.Tensor, silu: bool
) -> None:
    """Write x * scale + shift, and SiLU of that; for scale and shift `finish`."""
    _launch(x, target, scale, shift, each=x.shape[1], SILU=silu)


def divide_by_length(x: torch.Tensor, target: torch.Tensor, scale: torch.Tensor, factor: float, silu: bool) -> None:
    """Write each place's channels by their length, times scale (channels,) and factor, and SiLU of that."""
    _launch(x, target, scale, None, factor=factor, LENGTH=True, SILU=silu)


def add_to_channels(x: torch.Tensor, bias: torch.Tensor) -> None:
    """Add (channels,) to x where it is."""
    _launch(x, x, None, bias)


def _launch(
    x: torch.Tensor, target: torch.Tensor, scale: torch.Tensor | None, shift: torch.Tensor | None, *,
    factor: float = 1.0, each: int = 0, LENGTH: bool = False, SILU: bool = False,
) -> None:  # fmt: skip
    batch, channels, places, wide, tile = _sizes(x, x.shape[1] if LENGTH else _CHANNELS)
    _scale[(triton.cdiv(places, tile), batch, triton.cdiv(channels, wide))](
        x, scale, shift, target, places, channels, factor, each, LENGTH=LENGTH, SCALE=scale is not None,
        SHIFT=shift is not None, SILU=SILU, PLACES=tile, WIDE=wide,
    )  # fmt: skip


def double(x: torch.Tensor, target: torch.Tensor) -> None:
    """Write each pixel of (batch, channels, height, width) four times, into twice as many rows and columns."""
    batch, channels, places, wide, tile = _sizes(target, _CHANNELS)
    _double[(triton.cdiv(places, tile), batch, triton.cdiv(channels, wide))](
        x, target, x.shape[3], places, channels, PLACES=tile, WIDE=wide
    )


def _sizes(x: torch.Tensor, most: int, numbers: int = _NUMBERS) -> tuple[int, int, int, int, int]:
    """(batch, channels, places, channels and places of a tile), where a tile has no more than `most` channels, up to a
    power of two."""
    batch, channels = x.shape[:2]
    wide = triton.next_power_of_2(min(channels, most))
    return batch, channels, x.numel() // (batch * channels), wide, max(1, numbers // wide)
