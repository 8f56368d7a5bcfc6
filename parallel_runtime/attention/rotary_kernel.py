"""The kernel of rotary.py, in Triton, which comes with PyTorch's CUDA builds."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

Tensors = list[Tensor]


@triton.jit
def norm_and_rotate(
    source, weight, cos, sin, angle_step, eps, HEADS: tl.constexpr, ROWS: tl.constexpr, DIM: tl.constexpr,
    ACROSS: tl.constexpr, EACH: tl.constexpr,
):  # fmt: skip
    """(ROWS, DIM) heads of a token, normalised and rotated by its angles, each that of EACH dims (1 or 2), in the dtype
    of the source; HEADS of ROWS."""
    dtype = source.dtype.element_ty
    head = tl.arange(0, ROWS)[:, None]
    dim = tl.arange(0, DIM)[None, :]
    inside = head < HEADS
    x = tl.load(source + head * DIM + dim, mask=inside, other=0.0).to(tl.float32)
    if ACROSS:
        x = x * tl.rsqrt(tl.sum(tl.sum(x * x, 1), 0) / (HEADS * DIM) + eps)
        x = x * tl.load(weight + head * DIM + dim, mask=inside, other=0.0).to(tl.float32)
    else:
        x = x * tl.rsqrt(tl.sum(x * x, 1) / DIM + eps)[:, None] * tl.load(weight + dim).to(tl.float32)
    x = x.to(dtype).to(tl.float32)
    even, odd = tl.split(tl.reshape(x, (ROWS, DIM // 2, 2)))
    rotated = tl.reshape(tl.join(-odd, even), (ROWS, DIM))
    place = dim // EACH * angle_step
    return (x * tl.load(cos + place) + rotated * tl.load(sin + place)).to(dtype)


@triton.jit
def _kernel(
    query, key, query_weight, key_weight, cos, sin, query_target, key_target, total, first,
    query_batch, query_token, key_batch, key_token, angle_batch, angle_token, angle_step, eps,
    HEADS: tl.constexpr, ROWS: tl.constexpr, DIM: tl.constexpr, ACROSS: tl.constexpr, EACH: tl.constexpr,
):  # fmt: skip
    """Program (token, batch item, query or key): all heads of one token."""
    token, item = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    if tl.program_id(2) == 0:
        source = query + item * query_batch + token * query_token
        weight = query_weight
        target = query_target
    else:
        source = key + item * key_batch + token * key_token
        weight = key_weight
        target = key_target
    position = first + token
    angle = item * angle_batch + position * angle_token
    turned = norm_and_rotate(source, weight, cos + angle, sin + angle, angle_step, eps, HEADS, ROWS, DIM, ACROSS, EACH)
    head = tl.arange(0, ROWS)[:, None]
    place = head * DIM + tl.arange(0, DIM)[None, :]
    tl.store(target + (item * total + position) * HEADS * DIM + place, turned, mask=head < HEADS)


def launch(
    queries: Tensors, keys: Tensors, query_weights: Tensors, key_weights: Tensors, eps: float, cos: Tensor, sin: Tensor
) -> tuple[Tensor, Tensor]:
    """See `norm_rotate`; the head dim is a power of two."""
    both = [(queries, query_weights), (keys, key_weights)]
    if queries[0].shape[2] == keys[0].shape[2]:
        rotated = _launch(both, eps, cos, sin)
    else:  # the kernel knows one number of heads
        rotated = [launch_one(*each, eps, cos, sin) for each in both]
    return rotated[0], rotated[1]


def launch_one(parts: Tensors, weights: Tensors, eps: float, cos: Tensor, sin: Tensor) -> Tensor:
    """Of queries or keys alone."""
    return _launch([(parts, weights)], eps, cos, sin)[0]


def _launch(sides: list[tuple[Tensors, Tensors]], eps: float, cos: Tensor, sin: Tensor) -> Tensors:
    """Of one side or two with as many heads each: (parts, weights of their norms)."""
    (parts, _), others = sides[0], sides[-1]
    batch, _, heads, dim = parts[0].shape
    total = sum(part.shape[1] for part in parts)
    made = [parts[0].new_empty((batch, total, heads, dim)) for _ in sides]
    cos, sin, angle_strides = angles(cos, sin)
    first = 0
    for query, key, *weights in zip(parts, others[0], sides[0][1], others[1], strict=True):
        query, key = dense_heads(query), dense_heads(key)
        tokens = query.shape[1]
        if tokens:
            _kernel[(tokens, batch, len(sides))](
                query, key, *weights, cos, sin, made[0], made[-1], total, first,
                query.stride(0), query.stride(1), key.stride(0), key.stride(1), *angle_strides, eps,
                HEADS=heads, ROWS=triton.next_power_of_2(heads), DIM=dim, ACROSS=weights[0].numel() > dim,
                EACH=dim // cos.shape[-1], num_warps=warps(heads),
            )  # fmt: skip
        first += tokens
    return made


def dense_heads(part: Tensor) -> Tensor:
    """A token's heads side by side."""
    return part if part.stride(3) == 1 and part.stride(2) == part.shape[3] else part.contiguous()


def angles(cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, tuple[int, int, int]]:
    """Both with the same strides, and those of batch items, tokens and angles of one; see `norm_rotate`."""
    if cos.stride() != sin.stride():
        cos, sin = cos.contiguous(), sin.contiguous()
    return cos, sin, (cos.stride(0) if cos.dim() == 3 and cos.shape[0] > 1 else 0, cos.stride(-2), cos.stride(-1))


def warps(heads: int) -> int:
    """For a program that holds all heads of a token."""
    return 4 if heads <= 32 else 8
