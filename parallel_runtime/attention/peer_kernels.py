"""The two kernels of peer.py, in Triton, which comes with PyTorch's CUDA builds."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

_TILE = 2048
"""Words (8 bytes) that a program moves."""


@triton.jit
def _push_heads_kernel(
    query, key, value, table, rank, batch, query_batch, query_token, key_batch, key_token, value_batch, value_token,
    tokens, RANKS: tl.constexpr, ROW: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Program (rows, part and destination, columns): rows are tokens × batch, ROW the words of a rank's heads."""
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
    place = (((start + token) * batch + item) * 3 + part) * ROW
    tl.store(landing + place[:, None] + column[None, :], words, mask=inside)


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
    returned = tl.multiple_of(tl.load(table + RANKS + owner), 16).to(tl.pointer_type(tl.int64))
    place = (((token - start) * batch + item) * RANKS + rank) * ROW
    tl.store(returned[:, None] + place[:, None] + column[None, :], words, mask=inside)


def _tiles(row: int) -> tuple[int, int]:
    """Columns and rows of a tile for rows of so many words."""
    width = min(triton.next_power_of_2(row), 512)
    while row % width and width > 64:
        width //= 2
    return width, _TILE // width


def push_heads(parts: list[torch.Tensor], table: torch.Tensor, rank: int, ranks: int) -> None:
    """Write each rank's heads of query, key and value to its landing buffer.

    Args:
        parts: three of (batch, own tokens, words of all heads), int64, the last dim dense.
        table: see PeerBuffers.
    """
    batch, tokens, words = parts[0].shape
    width, rows = _tiles(words // ranks)
    strides = [stride for part in parts for stride in (part.stride(0), part.stride(1))]
    grid = (triton.cdiv(tokens * batch, rows), 3 * ranks, triton.cdiv(words // ranks, width))
    _push_heads_kernel[grid](
        *parts, table, rank, batch, *strides, tokens, RANKS=ranks, ROW=words // ranks, WIDTH=width, ROWS=rows
    )


def push_tokens(attended: torch.Tensor, table: torch.Tensor, rank: int, ranks: int) -> None:
    """Write the attended values of each rank's tokens to its returned buffer, beside those of the other ranks.

    Args:
        attended: (batch, tokens of all ranks, words of this rank's heads), int64, the last dim dense.
    """
    batch, tokens, words = attended.shape
    width, rows = _tiles(words)
    grid = (triton.cdiv(tokens * batch, rows), triton.cdiv(words, width))
    _push_tokens_kernel[grid](
        attended, table, rank, batch, attended.stride(0), attended.stride(1),
        tokens, RANKS=ranks, ROW=words, WIDTH=width, ROWS=rows,
    )  # fmt: skip
