"""Ulysses attention on P ranks is attention over the whole sequence on one."""

from __future__ import annotations

from itertools import accumulate
from typing import Any

import pytest
import torch
import torch.distributed as dist
from yunchang.comm.all_to_all import all_to_all_4D

from parallel_runtime.attention.kernels import KERNELS
from parallel_runtime.attention.over_ranks import WireLayout, ulysses_attention
from tests.ranks import run_ranks


def by_yunchang(parts: torch.Tensor, scale: float | None) -> torch.Tensor:
    """Attention over all tokens by yunchang's exchange, which wants equal shares and heads that divide."""
    query, key, value = (all_to_all_4D(part, 2, 1, group=dist.group.WORLD) for part in parts)
    attended = KERNELS["sdpa"].attend(query, key, value, None, scale)
    return all_to_all_4D(attended.contiguous(), 1, 2, group=dist.group.WORLD)


def largest_errors(rank: int, world_size: int, cases: list[list[Any]]) -> dict[str, Any]:
    """Run by `run_ranks`: this rank's largest difference per case (batch, heads, lengths, scale)."""
    errors = []
    for batch, heads, lengths, scale in cases:
        generator = torch.Generator().manual_seed(sum(lengths) + heads)
        whole = torch.randn(3, batch, sum(lengths), heads, 16, generator=generator)
        expected = KERNELS["math"].attend(*whole, None, scale)
        own = slice(sum(lengths[:rank]), sum(lengths[: rank + 1]))
        output = ulysses_attention(
            *whole[:, :, own],
            kernel=KERNELS["sdpa"].attend,
            group=dist.group.WORLD,
            layout=None if len(set(lengths)) == 1 else WireLayout.build(tuple(lengths), rank, whole.device),
            scale=scale,
        )
        assert output.shape == (batch, lengths[rank], heads, 16)
        errors.append(float((output - expected[:, own]).abs().max()))
        if len(set(lengths)) == 1 and heads % world_size == 0:
            theirs = by_yunchang(whole[:, :, own], scale)
            assert theirs.shape == output.shape
            errors.append(float((output - theirs).abs().max()))
    return {"errors": errors}


@pytest.mark.slow_but_for("2")  # three ranks are in the first tier as a family's: test_family_forward.py
@pytest.mark.parametrize("world_size", [2, 3])
def test_any_lengths_and_head_counts_give_attention_over_the_whole(world_size):
    cases: list[list[Any]] = []
    for batch in (1, 2):
        for heads in (world_size, 2 * world_size, 2 * world_size + 1, 1):  # the last two do not divide
            cases.append([batch, heads, [5] * world_size, None])
            cases.append([batch, heads, list(accumulate([4] + [3] * (world_size - 1))), 0.2])  # far from equal
            cases.append([batch, heads, [1] * (world_size - 1) + [5], None])
            cases.append([batch, heads, [7] + [6] * (world_size - 1), None])
    results = run_ranks(world_size, f"{__name__}:largest_errors", {"cases": cases})
    for result in results:
        assert max(result["errors"]) < 1e-5, result["errors"]
        assert len(result["errors"]) == len(cases) + 4  # yunchang's exchange, where it can, is the second oracle
