"""One forward of Wan on P ranks against the same diffusers transformer, unwrapped, in one process and float32."""

from __future__ import annotations

import logging
from typing import Any

import torch

from parallel_runtime.config import ParallelPlan
from parallel_runtime.mesh import build_mesh, single_rank_mesh
from parallel_runtime.models.wan import WAN
from parallel_runtime.wrappers.parallel_transformer import ParallelTransformer, parallelize
from tests.parallel_runtime.model_forward import relative_error
from tests.ranks import run_ranks
from tests.tiny_wan import build_transformer, tiny_config

IMAGE = {"image_dim": 24, "added_kv_proj_dim": 128, "in_channels": 20}

# ((frames, height, width) in latent pixels, text tokens, batch)
CASES: list[list[Any]] = [
    [[2, 6, 4], 6, 1],  # 12 tokens, which 2, 3 and 4 divide
    [[3, 5, 7], 5, 2],  # 36 tokens of odd sides
    [[1, 10, 10], 3, 2],  # 25, which none of them divides
    [[1, 2, 4], 4, 2],  # 2: on more ranks some would have no token
    [[1, 2, 2], 1, 1],  # 1 token
]
PLANS = [{"ulysses": 2}, {"ulysses": 3}, {"ulysses": 4}, {"ring": 2, "ulysses": 2}]


def forward(transformer: Any, case: list[Any], image: bool = False) -> torch.Tensor:
    """Run one call through the adapter, as the pool does."""
    size, text, batch = case
    config = transformer.config
    generator = torch.Generator().manual_seed(sum(size) + 100 * batch)
    extras = {"clip_fea": torch.randn(batch, 257, 24, generator=generator)} if image else {}
    x = torch.randn(batch, config["in_channels"], *size, generator=generator)
    context = torch.randn(batch, 512 if image else text, 48, generator=generator)
    timestep = torch.tensor([904.6, 31.25])[:batch]
    with torch.no_grad():
        arguments = WAN.adapter.to_transformer(x, timestep, context, config, **extras)
        return WAN.adapter.from_transformer(transformer(**arguments, return_dict=False)[0], x)


def run_plans(rank: int, world_size: int) -> dict[str, Any]:
    """Run by `run_ranks`: every case on every plan."""
    outputs = {}
    meshes = [build_mesh(ParallelPlan(**plan), rank, world_size) for plan in PLANS]
    for kind, changes in (("text", {}), ("image", IMAGE)):
        transformer: ParallelTransformer | None = None
        for number, mesh in enumerate(meshes):
            if mesh is None:
                continue
            transformer = transformer or parallelize(build_transformer(**changes), WAN, mesh)
            transformer.set_mesh(mesh)
            for case, given in enumerate(CASES if kind == "text" else CASES[1:2]):
                outputs[f"{kind} {number} {case}"] = forward(transformer, given, kind == "image")
    return outputs


def test_any_number_of_ranks_gives_the_one_process_result_on_every_rank():
    results = run_ranks(4, f"{__name__}:run_plans", timeout=250)
    for kind, changes in (("text", {}), ("image", IMAGE)):
        transformer = build_transformer(**changes)
        for case, given in enumerate(CASES if kind == "text" else CASES[1:2]):
            expected = forward(transformer, given, kind == "image")
            for number, plan in enumerate(PLANS):
                ranks = ParallelPlan(**plan).world_size
                outputs = [result.get(f"{kind} {number} {case}") for result in results]
                assert all(output is None for output in outputs[ranks:])
                assert relative_error(outputs[0], expected) < 1e-5, (kind, plan, given)
                assert all(torch.equal(output, outputs[0]) for output in outputs[1:ranks]), (kind, plan, given)


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
    results["unwrapped"] = forward(transformer.unwrap(), COMPILED[0])
    return results


def test_compiled_blocks_have_no_graph_breaks_and_new_sizes_soon_need_no_new_graph():
    results = run_ranks(2, f"{__name__}:run_compiled", timeout=280)
    transformer = build_transformer(num_layers=2)
    for result in results:
        for number, case in enumerate(COMPILED):
            assert relative_error(result[str(number)], forward(transformer, case)) < 1e-5, case
        assert result["breaks"] == 0
        assert result["graphs"][0] == 1  # however many blocks
        assert result["graphs"][len(LEARNT) - 1] == result["graphs"][-1]
        assert torch.equal(result["unwrapped"], forward(transformer, COMPILED[0]))


def test_the_timestep_reaches_the_embedding_unrounded_in_bfloat16():
    seen = []
    transformer = build_transformer(tiny_config(num_layers=1, num_attention_heads=1), torch.bfloat16)
    transformer.condition_embedder.timesteps_proj.register_forward_pre_hook(lambda module, args: seen.append(args[0]))
    x, context = torch.randn(1, 16, 1, 4, 4).bfloat16(), torch.randn(1, 3, 4096).bfloat16()
    timestep = torch.tensor([904.6])
    wrapped = parallelize(transformer, WAN, single_rank_mesh())
    wrapped(**WAN.adapter.to_transformer(x, timestep, context, transformer.config), return_dict=False)
    assert torch.equal(seen[0], timestep)
