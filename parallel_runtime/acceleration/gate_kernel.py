"""The kernel of a gate by SiLU, in Triton, which comes with PyTorch's CUDA builds."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

_NUMBERS = 1024


@triton.jit
def _silu_gate(both, target, inner, NUMBERS: tl.constexpr):
    """Program (row, some of its numbers): in float32, rounded once."""
    row = tl.program_id(0).to(tl.int64)
    place = tl.program_id(1) * NUMBERS + tl.arange(0, NUMBERS)
    inside = place < inner
    gate = tl.load(both + row * 2 * inner + place, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(both + (row * 2 + 1) * inner + place, mask=inside, other=0.0).to(tl.float32)
    made = gate / (1 + tl.exp(-gate)) * up
    tl.store(target + row * inner + place, made.to(target.dtype.element_ty), mask=inside)


def silu_gate(both: torch.Tensor) -> torch.Tensor:
    """SiLU of the first half of the last dim, times the second; contiguous."""
    inner = both.shape[-1] // 2
    made = both.new_empty((*both.shape[:-1], inner))
    if rows := made.numel() // inner:
        _silu_gate[(rows, triton.cdiv(inner, _NUMBERS))](both, made, inner, NUMBERS=_NUMBERS)
    return made
