"""Attention over any split of any shape, on P ranks, is attention over the whole on one."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from parallel_runtime.attention.kernels import KERNELS
from parallel_runtime.config import ParallelPlan
from parallel_runtime.mesh.mesh import Mesh, build_mesh
from parallel_runtime.networks.sequence_attention import AttendedTokens
from parallel_runtime.networks.shares import split_sizes
from tests.ranks import run_ranks

EXAMPLES = 40


@st.composite
def cases(draw: st.DrawFn, world_size: int) -> dict[str, Any]:
    """How the sequence is split, and the shapes and the mask of one attention."""
    factors = [degree for degree in range(1, world_size + 1) if world_size % degree == 0]
    return {
        "ulysses": draw(st.sampled_from(factors)),
        "kernel": draw(st.sampled_from(["sdpa", "math", "flash"])),
        "batch": draw(st.integers(1, 3)),
        "heads": draw(st.integers(1, 9)),
        "head_dim": draw(st.sampled_from([8, 16])),
        "image": draw(st.integers(1, 40)),
        "text": draw(st.integers(0, 9)),
        "speeds": draw(st.none() | st.lists(st.floats(0.05, 1), min_size=world_size, max_size=world_size).map(tuple)),
        "mask": draw(st.sampled_from(["none", "none", "bool", "float", "one for the batch"])),
        "scale": draw(st.sampled_from([None, 0.2])),
        "seed": draw(st.integers(0, 1000)),
    }


def attention(query, key, value, mask, scale):
    """Softmax attention in float64, written out; tensors (batch, tokens, heads, head dim)."""
    query, key, value = (tensor.double().transpose(1, 2) for tensor in (query, key, value))
    logits = query @ key.transpose(-1, -2) * (scale or 1 / math.sqrt(query.shape[-1]))
    if mask is not None:
        logits = logits + mask.double() if mask.is_floating_point() else logits.masked_fill(~mask, -torch.inf)
    return (logits.softmax(dim=-1) @ value).transpose(1, 2)


def make_mask(kind: str, batch: int, tokens: int, generator: torch.Generator) -> torch.Tensor | None:
    """A mask of keys that leaves at least one; most of them hide all keys of some rank."""
    if kind == "none":
        return None
    rows = 1 if kind == "one for the batch" else batch
    seen = torch.zeros(rows, 1, 1, tokens, dtype=torch.bool)
    for row in seen[:, 0, 0]:
        first, last = sorted(torch.randint(0, tokens, (2,), generator=generator).tolist())
        row[first : last + 1] = True
    if kind == "float":
        return torch.where(seen, torch.randn(seen.shape, generator=generator), -torch.inf)
    return seen


def error_of(case: dict[str, Any], mesh: Mesh) -> float:
    """This rank's largest difference, over the largest value of the whole; hidden keys hold huge numbers."""
    generator = torch.Generator().manual_seed(case["seed"])
    totals = {"image": case["image"], "text": case["text"]}
    tokens = sum(totals.values())
    query, key, value = torch.randn(3, case["batch"], tokens, case["heads"], case["head_dim"], generator=generator)
    mask = make_mask(case["mask"], case["batch"], tokens, generator)
    if mask is not None:
        hidden = (mask == -torch.inf) if mask.is_floating_point() else ~mask
        value = torch.where(hidden.transpose(1, 3).expand(case["batch"], -1, 1, 1), 1e30, value)
    whole = attention(query, key, torch.where(value > 1e29, 0.0, value), mask, case["scale"])
    attended, own = AttendedTokens(mesh), slice(0, tokens)
    shares = [split_sizes(total, mesh.plan.sequence, mesh.speeds) for total in totals.values()]
    lengths = tuple(sum(share) for share in zip(*shares, strict=True))
    if min(lengths) == 0:
        attended.degree = 1  # every rank computes all
    elif mesh.plan.sequence > 1:
        attended.split(lengths, case["batch"], query.device)
        own = slice(sum(lengths[: mesh.sequence_index]), sum(lengths[: mesh.sequence_index + 1]))
    output = attended.attend(
        KERNELS[case["kernel"]],
        query[:, own],
        key[:, own],
        value[:, own],
        None if mask is None else mask[..., own],
        case["scale"],
    )
    assert output.shape == query[:, own].shape
    error = (output - whole[:, own]).abs().max() / whole.abs().max()
    return float(error.nan_to_num(1e9))


def largest_error(rank: int, world_size: int) -> dict[str, Any]:
    """Run by `run_ranks`: hypothesis draws the same cases on all ranks, which agree on each one's outcome."""
    factors = [degree for degree in range(1, world_size + 1) if world_size % degree == 0]
    plans = [ParallelPlan(ulysses=degree, ring=world_size // degree) for degree in factors]
    meshes = {plan.ulysses: build_mesh(plan, rank, world_size) for plan in plans}
    seen: list[float] = []

    @settings(
        derandomize=True, database=None, deadline=None, max_examples=EXAMPLES, suppress_health_check=list(HealthCheck)
    )
    @given(cases(world_size))
    def check(case: dict[str, Any]) -> None:
        mesh = meshes[case["ulysses"]]
        assert mesh is not None
        error = torch.tensor(error_of(case, replace(mesh, speeds=case["speeds"])))
        dist.all_reduce(error, op=dist.ReduceOp.MAX)  # or a rank would go on to shrink a failure without the others
        seen.append(float(error))
        assert error < 1e-5, f"error {float(error)} in {case}"

    check()
    return {"cases": len(seen), "largest": max(seen)}


@pytest.mark.long_but_for("3", "8")
@pytest.mark.slow
@pytest.mark.parametrize("world_size", [2, 3, 4, 8])
def test_any_lengths_heads_masks_and_speeds_over_any_ring_times_ulysses_give_attention_over_the_whole(world_size):
    results = run_ranks(world_size, f"{__name__}:largest_error")
    assert results == [results[0]] * world_size
    assert results[0]["cases"] >= EXAMPLES / 2
    assert 0 < results[0]["largest"] < 1e-5
