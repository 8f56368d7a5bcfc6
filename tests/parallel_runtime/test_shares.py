"""Shares: splitting rows and putting them together again."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from parallel_runtime.config import ParallelPlan
from parallel_runtime.mesh.mesh import build_mesh, single_rank_mesh
from parallel_runtime.networks.shares import gather_batch, gather_shares, share_of_batch, split_sizes
from tests.ranks import run_ranks

SPEEDS = (0.2, 1.0, 0.7)


@given(total=st.integers(0, 60), degree=st.integers(1, 9))
def test_shares_are_near_equal_and_make_up_the_whole(total, degree):
    sizes = split_sizes(total, degree)
    assert sum(sizes) == total
    assert max(sizes) - min(sizes) <= 1
    assert list(sizes) == sorted(sizes, reverse=True)
    whole = torch.arange(2 * total).reshape(2, total)
    shares = whole.split(split_sizes(whole.shape[1], degree), 1)
    assert tuple(share.shape[1] for share in shares) == sizes
    assert torch.equal(torch.cat(shares, dim=1), whole)


@given(
    total=st.integers(0, 300), speeds=st.lists(st.floats(0.05, 1), min_size=1, max_size=9), scale=st.floats(0.5, 100)
)
def test_shares_by_speed_are_in_proportion_and_leave_nobody_without(total, speeds, scale):
    degree = len(speeds)
    sizes = split_sizes(total, degree, speeds)
    assert sum(sizes) == total
    assert min(sizes) >= min(1, total // degree)
    exact = [total * speed / sum(speeds) for speed in speeds]
    if min(exact) >= 1:
        assert all(abs(size - share) <= 1 for size, share in zip(sizes, exact, strict=True))
    for slow in range(degree):
        for fast in range(degree):
            assert speeds[slow] > speeds[fast] or sizes[slow] <= sizes[fast] + 1
    if len(set(speeds)) == 1:
        assert sizes == split_sizes(total, degree)


def test_two_ranks_with_speeds_of_two_to_one_hold_two_to_one():
    assert split_sizes(4608, 2, (1.0, 0.5)) == (3072, 1536)
    assert split_sizes(2, 2, (1.0, 0.1)) == (1, 1)
    assert split_sizes(1, 2, (0.1, 1.0)) == (0, 1)


def gather_everything(rank: int, world_size: int) -> dict[str, Any]:
    """Run by `run_ranks`: which gathers did not give the whole tensor back on this rank."""
    wrong = []
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        for total in range(9):
            for dim in (0, 1, 2, -2):
                shape = [2, 3, 4]
                shape[dim] = total
                whole = torch.randn(shape, generator=torch.Generator().manual_seed(total)).to(dtype)
                share = whole.split(split_sizes(whole.shape[dim], world_size), dim)[rank]
                gathered = gather_shares(share, dim, total, dist.group.WORLD, world_size)
                if not torch.equal(gathered, whole):
                    wrong.append(f"{dtype} {total} {dim}")
                share = whole.split(split_sizes(whole.shape[dim], world_size, SPEEDS), dim)[rank]
                gathered = gather_shares(share, dim, total, dist.group.WORLD, world_size, SPEEDS)
                if not torch.equal(gathered, whole):
                    wrong.append(f"{dtype} {total} {dim} by speed")
    mesh = build_mesh(ParallelPlan(data=world_size), rank, world_size)
    for batch in range(1, 8):
        whole = torch.arange(batch * 6.0).reshape(batch, 2, 3)
        start, stop = share_of_batch(batch, mesh)
        if not torch.equal(gather_batch(whole[start:stop], batch, mesh), whole):
            wrong.append(f"batch {batch}")
        frames = whole.repeat_interleave(4, 0)
        start, stop = share_of_batch(4 * batch, mesh, together=4)
        if start % 4 or stop % 4 or not torch.equal(gather_batch(frames[start:stop], 4 * batch, mesh, 4), frames):
            wrong.append(f"{batch} videos of 4 frames")
    return {"wrong": wrong}


def test_every_rank_gathers_the_whole_also_from_uneven_and_empty_shares():
    assert [result["wrong"] for result in run_ranks(3, f"{__name__}:gather_everything")] == [[], [], []]


@pytest.mark.parametrize("batch", [1, 5])
def test_one_rank_has_the_whole_batch(batch):
    rows = torch.randn(batch, 4)
    assert share_of_batch(batch, single_rank_mesh()) == (0, batch)
    assert gather_batch(rows, batch, single_rank_mesh()) is rows
