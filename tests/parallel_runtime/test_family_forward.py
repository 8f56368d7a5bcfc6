"""Every family on P ranks against the same diffusers transformer, unwrapped, in one process and float32."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch

from benchmarks.lone_stage import stage_of
from parallel_runtime.config import ParallelPlan
from parallel_runtime.mesh.mesh import build_mesh, single_rank_mesh
from parallel_runtime.networks.diffusers.parallel_transformer import parallelize
from parallel_runtime.pipefusion.denoise import forward_once
from parallel_runtime.pipefusion.runner import StageRunner
from parallel_runtime.requests.conditioning import Conditioning
from tests.families import FAMILIES, build, run
from tests.parallel_runtime.model_forward import relative_error
from tests.ranks import run_ranks

PLANS = [{"ulysses": 2}, {"ulysses": 3}, {"ulysses": 4}, {"ring": 2, "ulysses": 2}]
COMPILED = ["SD3.5 medium", "HunyuanDiT 1.2"]
"""A second attention in a block; long skips. FLUX.1 and Wan are in test_parallel_forward.py, test_wan_forward.py."""
IN_STAGES = ["PixArt-α", "HunyuanDiT 1.2"]


def run_plans(rank: int, world_size: int) -> dict[str, Any]:
    """Run by `run_ranks`: every call of every family on every plan."""
    outputs: dict[str, Any] = {}
    meshes = [build_mesh(ParallelPlan(**plan), rank, world_size) for plan in PLANS]
    for name, family in FAMILIES.items():
        transformer = parallelize(build(family), family.model, single_rank_mesh())
        for number, mesh in enumerate(meshes):
            if mesh is None:
                continue
            transformer.set_mesh(mesh)
            for place, call in enumerate(family.calls):
                outputs[f"{name} {number} {place}"] = run(transformer, family, call)
    return outputs


@pytest.fixture(scope="module")
def outputs() -> list[dict[str, Any]]:
    """What each of four ranks has of `run_plans`."""
    return run_ranks(4, f"{__name__}:run_plans")


@pytest.mark.slow
@pytest.mark.parametrize("name", FAMILIES)
def test_any_plan_gives_the_one_process_result_on_every_rank(outputs, name):
    family = FAMILIES[name]
    transformer = build(family)
    for place, call in enumerate(family.calls):
        expected = run(transformer, family, call)
        assert expected.std() > 0.1
        for number, plan in enumerate(PLANS):
            ranks = ParallelPlan(**plan).world_size
            own = [result.get(f"{name} {number} {place}") for result in outputs]
            assert all(output is None for output in own[ranks:])
            assert relative_error(own[0], expected) < 1e-5, (plan, place)
            assert all(torch.equal(output, own[0]) for output in own[1:ranks]), (plan, place)


def run_compiled(rank: int, world_size: int, name: str) -> dict[str, Any]:
    """Run by `run_ranks`: compiled blocks, on a call that does not divide."""
    from torch._dynamo.utils import counters

    logging.getLogger("torch._dynamo").setLevel(logging.ERROR)
    mesh = build_mesh(ParallelPlan(ulysses=world_size), rank, world_size)
    assert mesh is not None
    family = FAMILIES[name]
    transformer = parallelize(build(family), family.model, mesh, compile=True)
    output = run(transformer, family, family.calls[1])
    return {"output": output, "breaks": sum(counters["graph_break"].values())}


@pytest.mark.long
@pytest.mark.parametrize("name", COMPILED)
def test_compiled_blocks_without_graph_breaks_give_the_same_result(name):
    family = FAMILIES[name]
    expected = run(build(family), family, family.calls[1])
    for result in run_ranks(2, f"{__name__}:run_compiled", {"name": name}):
        assert relative_error(result["output"], expected) < 1e-5
        assert result["breaks"] == 0


def run_too_small(rank: int, world_size: int) -> dict[str, Any]:
    """Run by `run_ranks`: what each family makes of a single token."""
    mesh = build_mesh(ParallelPlan(ulysses=world_size), rank, world_size)
    small = {name: family for name, family in FAMILIES.items() if family.too_small is not None}
    return {name: run(parallelize(build(each), each.model, mesh), each, each.too_small) for name, each in small.items()}


def test_a_picture_of_fewer_tokens_than_ranks_is_computed_whole_on_all_ranks():
    first, second = run_ranks(2, f"{__name__}:run_too_small")
    assert set(first) == set(second) == {"SD3.5 medium", "HunyuanDiT 1.2"}
    for name, output in first.items():
        family = FAMILIES[name]
        assert torch.equal(output, second[name])
        assert relative_error(output, run(build(family), family, family.too_small)) < 1e-5


@torch.no_grad()
def run_stages(rank: int, world_size: int) -> dict[str, Any]:
    """Run by `run_ranks`: one exact call of every model in stages, each with its own blocks only."""
    plan = ParallelPlan(pipe=world_size)
    mesh = build_mesh(plan, rank, world_size)
    assert mesh is not None
    outputs: dict[str, Any] = {}
    for name in IN_STAGES:
        family, spec = FAMILIES[name], FAMILIES[name].model
        stage = stage_of(build(family), spec, mesh)
        for number, call in enumerate(family.calls):
            given = dict(call)
            x, timestep = given.pop("x"), given.pop("timestep")
            result = forward_once(StageRunner(stage, [Conditioning(given)], x, 1, keep=False), x, timestep)
            if result is not None:
                outputs[f"{name} {number}"] = result
    return outputs


def test_two_stages_give_the_one_process_result():
    first, last = run_ranks(2, f"{__name__}:run_stages")
    assert last == {}
    for name in IN_STAGES:
        family = FAMILIES[name]
        transformer = build(family)
        for number, call in enumerate(family.calls):
            assert relative_error(first[f"{name} {number}"], run(transformer, family, call)) < 1e-5, (name, number)


def test_the_timestep_of_flux_2_stays_exact_in_bfloat16():
    family = FAMILIES["FLUX.2"]
    transformer, reference = build(family).bfloat16(), build(family)
    reference.load_state_dict(transformer.state_dict())  # the same weights, rounded alike
    # Between two bfloat16 numbers, where rounding moves the scaled timestep by several units. The other values are
    # ones that bfloat16 has; of a guidance of 3.5, ComfyUI and diffusers both make 3.504 there.
    given = {name: tensor.bfloat16() for name, tensor in family.calls[1].items()}
    given |= {"timestep": torch.tensor([0.9046, 0.6039]), "guidance": torch.tensor([3.5])}
    exact = {name: tensor.float() for name, tensor in given.items()} | {"guidance": torch.tensor([3.504])}
    expected = run(reference, family, exact)
    rounded = run(transformer, family, given)
    output = run(parallelize(transformer, family.model, single_rank_mesh()), family, given)
    assert output.dtype == torch.bfloat16
    assert relative_error(output, expected) < 0.02
    assert relative_error(rounded, expected) > 5 * relative_error(output, expected)
