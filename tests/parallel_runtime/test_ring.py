"""Ring attention: merging parts, unlike lengths, and what it refuses."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from parallel_runtime.attention.kernels import KERNELS
from parallel_runtime.attention.over_ranks import merge
from parallel_runtime.config import ParallelPlan
from parallel_runtime.errors import ConfigurationError, UnsupportedModelError
from parallel_runtime.mesh.mesh import Mesh, build_mesh, single_rank_mesh
from parallel_runtime.networks.diffusers.flux import FLUX
from parallel_runtime.networks.diffusers.parallel_transformer import parallelize
from parallel_runtime.networks.sequence_attention import AttendedTokens
from parallel_runtime.networks.shares import split_sizes
from tests.parallel_runtime.flux_forward import build_transformer
from tests.ranks import run_ranks

ONE = single_rank_mesh()


@pytest.mark.slow
@given(
    lengths=st.lists(st.integers(1, 9), min_size=2, max_size=6),
    spread=st.sampled_from([0.1, 1.0, 30.0]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    seed=st.integers(0, 1000),
)
def test_merged_parts_are_attention_over_all_keys_in_float64(lengths, spread, dtype, seed):
    generator = torch.Generator().manual_seed(seed)
    query = spread * torch.randn(2, 5, 3, 16, generator=generator).to(dtype)
    key, value = torch.randn(2, 2, sum(lengths), 3, 16, generator=generator).to(dtype)
    logits = torch.einsum("bqhd,bkhd->bhqk", query.double(), key.double()) / math.sqrt(16)
    expected = torch.einsum("bhqk,bkhd->bqhd", logits.softmax(-1), value.double())
    # In float64, so that what is seen is the merge's own rounding to float32.
    merged = None
    for key_part, value_part in zip(key.split(lengths, 1), value.split(lengths, 1), strict=True):
        part_logits = torch.einsum("bqhd,bkhd->bhqk", query.double(), key_part.double()) / math.sqrt(16)
        part = torch.einsum("bhqk,bkhd->bqhd", part_logits.softmax(-1), value_part.double())
        part = part.to(torch.float32), part_logits.logsumexp(-1).to(torch.float32)
        merged = part if merged is None else merge(*merged, *part)
    assert merged is not None
    attended, lse = merged
    assert attended.dtype == lse.dtype == torch.float32
    assert (attended - expected).abs().max() < 1e-5 * max(1.0, float(value.abs().max())) * max(1.0, spread)
    assert (lse - logits.logsumexp(-1)).abs().max() < 1e-5 * max(1.0, spread)


def test_a_part_whose_keys_are_all_hidden_weighs_nothing():
    query, key, value = torch.randn(3, 1, 4, 2, 8, generator=torch.Generator().manual_seed(0))
    attend = KERNELS["sdpa"].attend_with_lse
    assert attend is not None
    seen = attend(query, key, value, None, None)
    hidden = attend(query, key, torch.full_like(value, 1e30), torch.zeros(1, 1, 1, 4, dtype=torch.bool), None)
    for merged in (merge(*seen, *hidden), merge(*hidden, *seen)):
        assert torch.equal(merged[0], seen[0])
        assert torch.equal(merged[1], seen[1])


def largest_errors(rank: int, world_size: int, totals: list[int]) -> dict[str, list[float]]:
    """Run by `run_ranks`: this rank's largest difference over a ring, for each number of tokens."""
    mesh = build_mesh(ParallelPlan(ring=world_size), rank, world_size)
    assert mesh is not None
    attended, errors = AttendedTokens(mesh), []
    for tokens in totals:
        query, key, value = torch.randn(3, 1, tokens, 2, 16, generator=torch.Generator().manual_seed(tokens))
        sizes = split_sizes(tokens, world_size)
        attended.start()
        attended.split(sizes, 1, query.device)
        own = [part.split(sizes, 1)[rank] for part in (query, key, value)]
        expected = KERNELS["math"].attend(query, key, value, None, None).split(sizes, 1)[rank]
        errors.append(float((attended.attend(KERNELS["sdpa"], *own, None, None) - expected).abs().max()))
    return {"errors": errors}


@pytest.mark.slow
@pytest.mark.parametrize("world_size", [2, 3])
def test_a_ring_of_any_lengths_gives_attention_over_the_whole(world_size):
    for result in run_ranks(world_size, f"{__name__}:largest_errors", {"totals": [24, 20, 25, 35, 13, 200]}):
        assert max(result["errors"]) < 1e-5


def test_a_kernel_without_log_sum_exp_is_refused_for_a_ring_by_name_with_those_that_can(monkeypatch):
    from parallel_runtime.attention import choice

    plain = {**KERNELS, "sdpa": replace(KERNELS["sdpa"], attend_with_lse=None)}
    monkeypatch.setattr(choice, "KERNELS", plain)
    ring = Mesh(ParallelPlan(ring=2), 0, ONE.coordinate)
    transformer = build_transformer()
    refusal = r"'sdpa' cannot run in a ring on cpu in float32.*log-sum-exp.*one of flash, math\."
    with pytest.raises(ConfigurationError, match=refusal):
        parallelize(transformer, FLUX, ring, attention="sdpa")
    wrapped = parallelize(transformer, FLUX, ONE, attention="sdpa")
    with pytest.raises(ConfigurationError, match=refusal):
        wrapped.set_mesh(ring)
    assert wrapped.mesh is ONE
    parallelize(build_transformer(), FLUX, ring, attention="flash")


@pytest.mark.parametrize("shape", [(1, 1, 4, 4), (1, 2, 1, 4), (3, 1, 1, 4), (1, 1, 1, 5), (4, 4)])
@pytest.mark.parametrize("axis", ["ulysses", "ring"])
def test_a_mask_that_is_not_of_this_ranks_keys_is_refused_where_the_sequence_is_split(axis, shape):
    mesh = Mesh(ParallelPlan(**{axis: 2}), 0, ONE.coordinate)
    attended, query = AttendedTokens(mesh), torch.zeros(2, 4, 2, 8)
    with pytest.raises(UnsupportedModelError, match="mask of shape .* 4 keys"):
        attended.attend(KERNELS["math"], query, query, query, torch.zeros(shape, dtype=torch.bool), None)
