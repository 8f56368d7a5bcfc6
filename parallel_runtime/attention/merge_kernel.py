"""`merge` of over_ranks.py as one kernel, in Triton: PyTorch's own would write and read each part in float32."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .rotary_kernel import warps


@triton.jit
def _kernel(
    one, other, one_lse, other_lse, merged, merged_lse,
    one_batch, one_token, one_head, other_batch, other_token, other_head,
    one_lse_batch, one_lse_head, one_lse_token, other_lse_batch, other_lse_head, other_lse_token, tokens,
    HEADS: tl.constexpr, ROWS: tl.constexpr, DIM: tl.constexpr,
):  # fmt: skip
    """Program (token, batch item): all heads of a query."""
    token, item = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    head = tl.arange(0, ROWS)
    inside = head < HEADS
    place = item * one_lse_batch + head * one_lse_head + token * one_lse_token
    first = tl.load(one_lse + place, mask=inside, other=0.0).to(tl.float32)
    place = item * other_lse_batch + head * other_lse_head + token * other_lse_token
    second = tl.load(other_lse + place, mask=inside, other=0.0).to(tl.float32)
    most = tl.maximum(first, second)
    total = tl.exp(first - most) + tl.exp(second - most)
    weight = (tl.exp(second - most) / total)[:, None]
    dim, whole = tl.arange(0, DIM)[None, :], inside[:, None]
    place = item * one_batch + token * one_token + head[:, None] * one_head + dim
    x = tl.load(one + place, mask=whole, other=0.0).to(tl.float32)
    place = item * other_batch + token * other_token + head[:, None] * other_head + dim
    y = tl.load(other + place, mask=whole, other=0.0).to(tl.float32)
    place = ((item * tokens + token) * HEADS + head[:, None]) * DIM + dim
    tl.store(merged + place, ((1 - weight) * x + weight * y).to(merged.dtype.element_ty), mask=whole)
    tl.store(merged_lse + (item * HEADS + head) * tokens + token, most + tl.log(total), mask=inside)


def launch(attended: Tensor, lse: Tensor, part: Tensor, part_lse: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """As `merge`; the head dim is a power of two, and a head's numbers lie side by side."""
    batch, tokens, heads, dim = attended.shape
    merged, merged_lse = attended.new_empty(attended.shape, dtype=dtype), torch.empty_like(lse).contiguous()
    _kernel[(tokens, batch)](
        attended, part, lse, part_lse, merged, merged_lse, *attended.stride()[:3], *part.stride()[:3], *lse.stride(),
        *part_lse.stride(), tokens, HEADS=heads, ROWS=triton.next_power_of_2(heads), DIM=dim, num_warps=warps(heads),
    )  # fmt: skip
    return merged, merged_lse
