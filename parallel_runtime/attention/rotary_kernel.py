"""The kernel of rotary.py, in Triton, which comes with PyTorch's CUDA builds."""

from __future__ import annotations

import torch
import triton
import triton.language as tl


@triton.jit
def norm_and_rotate(
    source, inside, weight, cos, sin, position, eps, ROWS: tl.constexpr, DIM: tl.constexpr
):  # fmt: skip
    """(ROWS, DIM) heads of the token at `position`, normalised and rotated, in the dtype of the source."""
    dtype = source.dtype.element_ty
    dim = tl.arange(0, DIM)
    x = tl.load(source, mask=inside, other=0.0).to(tl.float32)
    scale = tl.rsqrt(tl.sum(x * x, 1) / DIM + eps)
    x = x * scale[:, None] * tl.load(weight + dim).to(tl.float32)[None, :]
    x = x.to(dtype).to(tl.float32)
    even, odd = tl.split(tl.reshape(x, (ROWS, DIM // 2, 2)))
    rotated = tl.reshape(tl.join(-odd, even), (ROWS, DIM))
    turned = x * tl.load(cos + position * DIM + dim)[None, :] + rotated * tl.load(sin + position * DIM + dim)[None, :]
    return turned.to(dtype)


@triton.jit
def _kernel(
    query, key, query_weight, key_weight, cos, sin, query_target, key_target, total, first,
    query_batch, query_token, key_batch, key_token, eps,
    HEADS: tl.constexpr, ROWS: tl.constexpr, DIM: tl.constexpr,
):  # fmt: skip
    """Program (token, batch item, query or key): all heads of one token."""
    token, item = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    head = tl.arange(0, ROWS)[:, None]
    dim = tl.arange(0, DIM)
    place = head * DIM + dim[None, :]
    inside = head < HEADS
    if tl.program_id(2) == 0:
        source = query + item * query_batch + token * query_token
        weight = query_weight
        target = query_target
    else:
        source = key + item * key_batch + token * key_token
        weight = key_weight
        target = key_target
    position = first + token
    turned = norm_and_rotate(source + place, inside, weight, cos, sin, position, eps, ROWS, DIM)
    out = target + (item * total + position) * HEADS * DIM
    tl.store(out + place, turned, mask=inside)


def launch(
    queries: list[torch.Tensor],
    keys: list[torch.Tensor],
    query_weights: list[torch.Tensor],
    key_weights: list[torch.Tensor],
    eps: float,
    cos: torch.Tensor,
    sin: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """See `norm_rotate`; the head dim is a power of two."""
    batch, _, heads, dim = queries[0].shape
    total = sum(part.shape[1] for part in queries)
    targets = [queries[0].new_empty((batch, total, heads, dim)) for _ in range(2)]
    first = 0
    for query, key, *weights in zip(queries, keys, query_weights, key_weights, strict=True):
        query, key = dense_heads(query), dense_heads(key)
        tokens = query.shape[1]
        if tokens:
            _kernel[(tokens, batch, 2)](
                query, key, *weights, cos, sin, *targets, total, first,
                query.stride(0), query.stride(1), key.stride(0), key.stride(1), eps,
                HEADS=heads, ROWS=triton.next_power_of_2(heads), DIM=dim, num_warps=4,
            )  # fmt: skip
        first += tokens
    return targets[0], targets[1]


def dense_heads(part: torch.Tensor) -> torch.Tensor:
    """A token's heads side by side."""
    return part if part.stride(3) == 1 and part.stride(2) == part.shape[3] else part.contiguous()
