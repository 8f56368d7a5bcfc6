"""Ulysses attention on P ranks is attention over the whole sequence on one."""

from __future__ import annotations

import os
from itertools import accumulate
from typing import Any

import pytest
import torch
import torch.distributed as dist
import yunchang
from yunchang.comm.all_to_all import all_to_all_4D

from parallel_runtime import switches
from parallel_runtime.attention.kernels import KERNELS
from parallel_runtime.attention.ulysses import WireLayout, ulysses_attention
from parallel_runtime.attention.yunchang_exchange import exchange_and_attend
from parallel_runtime.config import ParallelPlan
from parallel_runtime.mesh.mesh import build_mesh
from parallel_runtime.networks.diffusers.flux import FLUX
from parallel_runtime.networks.parallel_transformer import parallelize
from tests.parallel_runtime.flux_forward import build_transformer, relative_error, run
from tests.ranks import run_ranks


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
            degree=world_size,
            layout=None if len(set(lengths)) == 1 else WireLayout.build(tuple(lengths), rank, whole.device),
            scale=scale,
        )
        assert output.shape == (batch, lengths[rank], heads, 16)
        errors.append(float((output - expected[:, own]).abs().max()))
        if len(set(lengths)) == 1 and heads % world_size == 0:
            kernel, group = KERNELS["sdpa"].attend, dist.group.WORLD
            theirs = exchange_and_attend(
                *whole[:, :, own], exchange=all_to_all_4D, kernel=kernel, group=group, scale=scale
            )
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


def forward_with_exchanges(rank: int, world_size: int) -> dict[str, Any]:
    """Run by `run_ranks`: a forward with our exchange, and one with it switched off; how often yunchang's ran."""
    calls = []

    def counted(*given: Any, **named: Any) -> torch.Tensor:
        calls.append(given[1:])
        return all_to_all_4D(*given, **named)

    mesh = build_mesh(ParallelPlan(ulysses=world_size), rank, world_size)
    outputs = {}
    for off in ("", "exchange"):
        os.environ[switches.VARIABLE] = off
        yunchang.comm.all_to_all.all_to_all_4D = counted
        transformer = parallelize(build_transformer(), FLUX, mesh)
        outputs[off or "ours"] = run(transformer, (4, 6), 12)
        outputs[f"{off or 'ours'} calls"] = len(calls)
        outputs[f"{off or 'ours'} uneven"] = run(transformer, (5, 5), 7)
    outputs["calls"] = len(calls)
    return outputs


def test_switched_off_ours_leaves_even_shares_to_yunchang_with_the_same_result():
    for result in run_ranks(2, f"{__name__}:forward_with_exchanges"):
        calls = [result[name] for name in ("ours calls", "exchange calls", "calls")]
        assert calls == [0, 8, 8]  # two blocks; query, key, value and the way back; none for the uneven shares
        assert relative_error(result["exchange"], result["ours"]) < 1e-6
        assert torch.equal(result["exchange uneven"], result["ours uneven"])
