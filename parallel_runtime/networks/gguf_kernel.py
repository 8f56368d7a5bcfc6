"""Blocks of GGUF's types as numbers, in Triton, which comes with PyTorch's CUDA builds: layouts of ggml
(ggml-common.h). Rounds where ComfyUI-GGUF's code does, which computes in float16 step by step: the same bit for bit."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

LAYOUTS = {
    "Q4_0": (32, 18), "Q5_0": (32, 22), "Q8_0": (32, 34), "Q4_K": (256, 144), "Q5_K": (256, 176), "Q6_K": (256, 210),
}  # fmt: skip
"""Types that the kernel knows: numbers of a block, and its bytes."""
_STEP = 1024


@triton.jit
def _rounded(x):
    return x.to(tl.float16).to(tl.float32)


@triton.jit
def _six_bits(low, high, index, group):
    """A scale (group 0) or minimum (group 1) of eight in twelve bytes."""
    first = low + group * 4
    simple = tl.load(first + index % 4).to(tl.int32)
    packed = tl.load(high + index % 4).to(tl.int32)
    joined = ((packed >> (4 * group)) & 15) | ((simple >> 2) & 48)
    return tl.where(index < 4, simple & 63, joined)


@triton.jit
def _kernel(
    stored, halves, target, count, KIND: tl.constexpr, EACH: tl.constexpr, BYTES: tl.constexpr, STEP: tl.constexpr
):
    """STEP numbers a program."""
    at = tl.program_id(0).to(tl.int64) * STEP + tl.arange(0, STEP)
    inside = at < count
    at = tl.where(inside, at, 0)
    place = (at % EACH).to(tl.int32)
    block = at // EACH * BYTES
    start, half = stored + block, block // 2
    if KIND == "Q8_0":
        quant = tl.load(start + 2 + place).to(tl.int8, bitcast=True).to(tl.float32)
        value = tl.load(halves + half).to(tl.float32) * quant
    elif KIND == "Q4_0":
        byte = tl.load(start + 2 + place % 16).to(tl.int32)
        value = tl.load(halves + half).to(tl.float32) * (((byte >> (place // 16 * 4)) & 15) - 8).to(tl.float32)
    elif KIND == "Q5_0":
        byte = tl.load(start + 6 + place % 16).to(tl.int32)
        fifth = (tl.load(start + 2 + place // 8).to(tl.int32) >> (place % 8)) & 1
        quant = ((byte >> (place // 16 * 4)) & 15) | (fifth << 4)
        value = tl.load(halves + half).to(tl.float32) * (quant - 16).to(tl.float32)
    elif KIND == "Q6_K":
        part, rest = place // 128, place % 128
        low = tl.load(start + part * 64 + rest % 64).to(tl.int32) >> (rest // 64 * 4)
        high = tl.load(start + 128 + part * 32 + rest % 32).to(tl.int32) >> (rest // 32 * 2)
        quant = ((low & 15) | ((high & 3) << 4)) - 32
        scale = tl.load(start + 192 + place // 16).to(tl.int8, bitcast=True).to(tl.float32)
        value = _rounded(tl.load(halves + half + 104).to(tl.float32) * scale) * quant.to(tl.float32)
    else:
        group, pos = place // 32, place % 32
        nibbles = start + (16 if KIND == "Q4_K" else 48)
        quant = (tl.load(nibbles + group // 2 * 32 + pos).to(tl.int32) >> (group % 2 * 4)) & 15
        if KIND == "Q5_K":
            quant = quant | (((tl.load(start + 16 + pos).to(tl.int32) >> group) & 1) << 4)
        scale = _six_bits(start + 4, start + 12, group, 0).to(tl.float32)
        least = _six_bits(start + 4, start + 12, group, 1).to(tl.float32)
        scale = _rounded(tl.load(halves + half).to(tl.float32) * scale)
        least = _rounded(tl.load(halves + half + 1).to(tl.float32) * least)
        value = _rounded(scale * quant.to(tl.float32)) - least
    tl.store(target + at, _rounded(value).to(target.dtype.element_ty), mask=inside)


def dequantise(stored: torch.Tensor, kind: str, rows: int, columns: int, dtype: torch.dtype) -> torch.Tensor:
    """Numbers of a weight, (rows, columns), of its bytes, contiguous on a GPU; `kind` is one of LAYOUTS."""
    made = torch.empty((rows, columns), dtype=dtype, device=stored.device)
    each, size = LAYOUTS[kind]
    grid = (triton.cdiv(made.numel(), _STEP),)
    _kernel[grid](stored, stored.view(torch.float16), made, made.numel(), KIND=kind, EACH=each, BYTES=size, STEP=_STEP)
    return made
