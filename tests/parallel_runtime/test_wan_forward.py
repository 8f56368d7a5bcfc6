"""Wan's compiled blocks and its timestep; the rest is in test_family_forward.py."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch

from parallel_runtime.config import ParallelPlan
from parallel_runtime.mesh.mesh import build_mesh, single_rank_mesh
from parallel_runtime.networks.diffusers.parallel_transformer import parallelize
from parallel_runtime.networks.diffusers.wan import WAN
from tests.parallel_runtime.model_forward import relative_error
from tests.ranks import run_ranks
from tests.tiny_wan import build_transformer, tiny_config


def forward(transformer: Any, case: list[Any]) -> torch.Tensor:
    """Run one call through the adapter, as the pool does."""
    size, text, batch = case
    config = transformer.config
    generator = torch.Generator().manual_seed(sum(size) + 100 * batch)
    x = torch.randn(batch, config["in_channels"], *size, generator=generator)
    context = torch.randn(batch, text, 48, generator=generator)
    timestep = torch.tensor([904.6, 31.25])[:batch]
    with torch.no_grad():
        arguments = WAN.to_transformer(x, timestep, context, config)
        return WAN.from_transformer(transformer(**arguments, return_dict=False)[0], x)


LEARNT: list[list[Any]] = [[[2, 6, 4], 6, 2], [[2, 8, 6], 4, 2], [[1, 10, 10], 9, 2]]
"""A size, another, and one that does not divide; then sizes that need nothing new."""
COMPILED: list[list[Any]] = [*LEARNT, [[3, 8, 4], 12, 2], [[3, 6, 6], 3, 2]]


def run_compiled(rank: int, world_size: int) -> dict[str, Any]:
    """Run by `run_ranks`: compiled blocks; outputs, and the number of graphs after every case."""
    from torch._dynamo.utils import counters

    logging.getLogger("torch._dynamo").setLevel(logging.ERROR)
    mesh = build_mesh(ParallelPlan(ulysses=world_size), rank, world_size)
    assert mesh is not None
    transformer = parallelize(build_transformer(num_layers=2), WAN, mesh, compile=True)
    results: dict[str, Any] = {"graphs": []}
    for number, case in enumerate(COMPILED):
        results[str(number)] = forward(transformer, case)
        results["graphs"].append(counters["stats"]["unique_graphs"])
    results["breaks"] = sum(counters["graph_break"].values())
    return results


@pytest.mark.long
def test_compiled_blocks_have_no_graph_breaks_and_new_sizes_soon_need_no_new_graph():
    results = run_ranks(2, f"{__name__}:run_compiled")
    transformer = build_transformer(num_layers=2)
    for result in results:
        for number, case in enumerate(COMPILED):
            assert relative_error(result[str(number)], forward(transformer, case)) < 1e-5, case
        assert result["breaks"] == 0
        assert result["graphs"][0] == 1  # however many blocks
        assert result["graphs"][len(LEARNT) - 1] == result["graphs"][-1]


def test_the_timestep_reaches_the_embedding_unrounded_in_bfloat16():
    seen = []
    transformer = build_transformer(tiny_config(num_layers=1, num_attention_heads=1), torch.bfloat16)
    transformer.condition_embedder.timesteps_proj.register_forward_pre_hook(lambda module, args: seen.append(args[0]))
    x, context = torch.randn(1, 16, 1, 4, 4).bfloat16(), torch.randn(1, 3, 4096).bfloat16()
    timestep = torch.tensor([904.6])
    wrapped = parallelize(transformer, WAN, single_rank_mesh())
    wrapped(**WAN.to_transformer(x, timestep, context, transformer.config), return_dict=False)
    assert torch.equal(seen[0], timestep)
