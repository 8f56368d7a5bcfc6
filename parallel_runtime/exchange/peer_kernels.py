"""The kernels of peer_exchange.py, in Triton, which comes with PyTorch's CUDA builds."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from ..attention.rotary_kernel import Tensors, angles, dense_heads, norm_and_rotate, warps

_TILE = 2048  # words (8 bytes) that a program moves


@triton.jit
def _push_heads_kernel(
    query, key, value, table, staging, rank, batch, query_batch, query_token, key_batch, key_token, value_batch,
    value_token, tokens, STAGED: tl.constexpr, RANKS: tl.constexpr, ROW: tl.constexpr, WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
):  # fmt: skip
    """Program (rows, part and destination, columns): rows are tokens × batch, ROW the words of a rank's heads. STAGED
    keeps what is for other ranks here, in `staging`, (RANKS, own tokens, batch, 3, ROW)."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    part = tl.program_id(1) // RANKS
    to = tl.program_id(1) % RANKS
    column = tl.program_id(2) * WIDTH + tl.arange(0, WIDTH)
    token = row // batch
    item = row % batch
    inside = (row < tokens * batch)[:, None] & (column < ROW)[None, :]
    if part == 0:
        source = query + (item * query_batch + token.to(tl.int64) * query_token)[:, None]
    elif part == 1:
        source = key + (item * key_batch + token.to(tl.int64) * key_token)[:, None]
    else:
        source = value + (item * value_batch + token.to(tl.int64) * value_token)[:, None]
    words = tl.load(source + to * ROW + column[None, :], mask=inside)
    start = tl.load(table + 2 * RANKS + rank)
    landing = tl.multiple_of(tl.load(table + to), 16).to(tl.pointer_type(tl.int64))
    place = ((token * batch + item).to(tl.int64) * 3 + part) * ROW
    if STAGED and to != rank:
        target = staging + to.to(tl.int64) * tokens * batch * 3 * ROW
    else:
        target = landing + start * batch * 3 * ROW
    tl.store(target + place[:, None] + column[None, :], words, mask=inside)


@triton.jit
def _push_normed_heads_kernel(
    query, key, value, query_weight, key_weight, cos, sin, table, staging, rank, batch, query_batch, query_token,
    key_batch, key_token, value_batch, value_token, angle_batch, angle_token, angle_step, first, own, eps,
    STAGED: tl.constexpr, RANKS: tl.constexpr, HEADS: tl.constexpr, ROWS: tl.constexpr, DIM: tl.constexpr,
    ACROSS: tl.constexpr, EACH: tl.constexpr,
):  # fmt: skip
    """Program (token of a part, batch item, query or key or value): all heads of one token."""
    token, item, kind = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64), tl.program_id(2)
    head = tl.arange(0, ROWS)
    dim = tl.arange(0, DIM)
    inside = (head < HEADS)[:, None]
    position = first + token
    angle = item * angle_batch + position * angle_token
    if kind == 0:
        source = query + item * query_batch + token * query_token
        x = norm_and_rotate(
            source, query_weight, cos + angle, sin + angle, angle_step, eps, HEADS, ROWS, DIM, ACROSS, EACH
        )
    elif kind == 1:
        source = key + item * key_batch + token * key_token
        x = norm_and_rotate(
            source, key_weight, cos + angle, sin + angle, angle_step, eps, HEADS, ROWS, DIM, ACROSS, EACH
        )
    else:
        source = value + item * value_batch + token * value_token
        x = tl.load(source + head[:, None] * DIM + dim[None, :], mask=inside)
    dtype = query.dtype.element_ty
    row: tl.constexpr = HEADS // RANKS * DIM * (dtype.primitive_bitwidth // 8)  # bytes of a token's heads of one rank
    to = head // (HEADS // RANKS)
    landing = tl.load(table + to, mask=head < HEADS, other=0)
    target = landing + (((tl.load(table + 2 * RANKS + rank) + position) * batch + item) * 3 + kind) * row
    if STAGED:
        staged = staging.to(tl.int64) + (((to * own + position) * batch + item) * 3 + kind) * row
        target = tl.where(to == rank, target, staged)
    pointer = tl.multiple_of(target, 16).to(tl.pointer_type(dtype))[:, None]
    tl.store(pointer + (head % (HEADS // RANKS))[:, None] * DIM + dim[None, :], x, mask=inside)


@triton.jit
def _push_tokens_kernel(
    attended, table, rank, batch, stride_batch, stride_token,
    tokens, RANKS: tl.constexpr, ROW: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Program (rows, columns): rows are all tokens × batch, ROW the words of this rank's heads."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    token = row // batch
    item = row % batch
    inside = (row < tokens * batch)[:, None] & (column < ROW)[None, :]
    words = tl.load(
        attended + (item * stride_batch + token.to(tl.int64) * stride_token)[:, None] + column[None, :], mask=inside
    )
    owner = tl.zeros_like(token)
    for other in tl.static_range(1, RANKS):
        owner += (token >= tl.load(table + 2 * RANKS + other)).to(owner.dtype)
    start = tl.load(table + 2 * RANKS + owner)
    own = tl.load(table + 2 * RANKS + owner + 1) - start
    returned = tl.multiple_of(tl.load(table + RANKS + owner), 16).to(tl.pointer_type(tl.int64))
    place = ((rank * own + token - start) * batch + item) * ROW
    tl.store(returned[:, None] + place[:, None] + column[None, :], words, mask=inside)


def _tiles(row: int) -> tuple[int, int]:
    """Columns and rows of a tile for rows of so many words."""
    width = min(triton.next_power_of_2(row), 512)
    while row % width and width > 64:
        width //= 2
    return width, _TILE // width


def push_heads(parts: Tensors, table: Tensor, rank: int, ranks: int, staging: Tensor | None = None) -> None:
    """Write each rank's heads of query, key and value (parts, (batch, own tokens, words of all heads), int64, the last
    dim dense) to its landing buffer, or those of other ranks to `staging`, (ranks, own tokens, batch, 3, words of a
    rank's heads), int64; `table` is that of PeerBuffers."""
    batch, tokens, words = parts[0].shape
    width, rows = _tiles(words // ranks)
    strides = [stride for part in parts for stride in (part.stride(0), part.stride(1))]
    grid = (triton.cdiv(tokens * batch, rows), 3 * ranks, triton.cdiv(words // ranks, width))
    _push_heads_kernel[grid](
        *parts, table, table if staging is None else staging, rank, batch, *strides, tokens,
        STAGED=staging is not None, RANKS=ranks, ROW=words // ranks, WIDTH=width, ROWS=rows,
    )  # fmt: skip


def push_normed_heads(
    queries: Tensors, keys: Tensors, values: Tensors, norms: Tensors, eps: float, table: Tensor, rank: int, ranks: int,
    staging: Tensor | None = None,
) -> None:  # fmt: skip
    """`rotary.norm_rotate` and `push_heads` in one, arguments as of `attend_over_peers`; the head dim is a power of
    two, heads a multiple of the ranks. `staging` is (ranks, own tokens, batch, 3, heads / ranks, head dim)."""
    batch, _, heads, dim = queries[0].shape
    own, count = sum(part.shape[1] for part in queries), len(queries)
    weights = zip(norms[:count], norms[count : 2 * count], strict=True)
    cos, sin, angle_strides = angles(*norms[2 * count :])
    first = 0
    for query, key, value, pair in zip(queries, keys, values, weights, strict=True):
        parts = [dense_heads(part) for part in (query, key, value)]
        strides = [stride for part in parts for stride in (part.stride(0), part.stride(1))]
        tokens = query.shape[1]
        if tokens:
            _push_normed_heads_kernel[(tokens, batch, 3)](
                *parts, *pair, cos, sin, table, table if staging is None else staging, rank, batch, *strides,
                *angle_strides, first, own, eps, STAGED=staging is not None, RANKS=ranks, HEADS=heads,
                ROWS=triton.next_power_of_2(heads), DIM=dim, ACROSS=pair[0].numel() > dim,
                EACH=dim // cos.shape[-1], num_warps=warps(heads),
            )  # fmt: skip
        first += tokens


def push_tokens(attended: Tensor, table: Tensor, rank: int, ranks: int) -> None:
    """Write the attended values of each rank's tokens, (batch, tokens of all ranks, words of this rank's heads), int64,
    the last dim dense, to its returned buffer, behind those of the ranks before this one."""
    batch, tokens, words = attended.shape
    width, rows = _tiles(words)
    grid = (triton.cdiv(tokens * batch, rows), triton.cdiv(words, width))
    _push_tokens_kernel[grid](
        attended, table, rank, batch, attended.stride(0), attended.stride(1),
        tokens, RANKS=ranks, ROW=words, WIDTH=width, ROWS=rows,
    )  # fmt: skip
