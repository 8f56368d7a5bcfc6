"""What each rank of the PipeFusion tests runs: cases of one world size, on a transformer made from a seed."""

from __future__ import annotations

import copy
from functools import cache
from typing import Any

import torch

from benchmarks.lone_stage import stage_of
from parallel_runtime.config import ParallelConfig, ParallelPlan
from parallel_runtime.denoising.denoise import Denoising
from parallel_runtime.denoising.predict import Call, Predictor
from parallel_runtime.engine.opened import DiffusersFamily
from parallel_runtime.engine.rank_state import Meshes
from parallel_runtime.engine.residency import Resident
from parallel_runtime.engine.weight_store import WeightStore
from parallel_runtime.mesh.mesh import build_mesh, single_rank_mesh
from parallel_runtime.networks.diffusers.flux import FLUX
from parallel_runtime.networks.diffusers.parallel_transformer import ParallelTransformer, parallelize
from parallel_runtime.pipefusion.denoise import PipelineDenoising, forward_once
from parallel_runtime.pipefusion.runner import StageRunner
from parallel_runtime.planning.wish import TYPICAL, Wish
from parallel_runtime.requests.conditioning import Conditioning
from parallel_runtime.requests.facts import CPU
from parallel_runtime.requests.requests import ConditioningRef, Sample
from tests.families import facts_of
from tests.parallel_runtime.flux_forward import build_transformer

LAYERS = 4


class Quiet:
    """A control that nobody listens to; cancels after a number of votes if told so."""

    def __init__(self, cancel_after: int | None = None):
        self.steps: list[int] = []
        self.votes, self._cancel_after = 0, cancel_after

    def progress(self, step: int, total: int, denoised: torch.Tensor | None = None) -> None:
        self.steps.append(step)

    def before_compiling(self) -> None:
        pass

    def measuring(self) -> None:
        pass

    def check_cancel(self) -> None:
        pass

    def loading(self, done: int, total: int) -> None:
        self.check_cancel()

    def vote_stop(self, members: Any) -> Any:
        self.votes += 1
        stop = self._cancel_after is not None and self.votes > self._cancel_after
        return lambda: stop

    def all_stop(self, members: Any) -> bool:
        return self.vote_stop(members)()


@cache
def whole_transformer(dtype: torch.dtype) -> Any:
    """The transformer of all cases, which stages are cut from; a copy of it is made sooner than another one."""
    return build_transformer(layers=LAYERS, dtype=dtype)


def make_inputs(case: dict[str, Any]) -> dict[str, Any]:
    """Latent, sigmas and conditionings of a case, the same in every process."""
    height, width = case["latent"]
    batch = case.get("batch", 1)
    texts = case.get("texts", [5])
    generator = torch.Generator().manual_seed(height * 100 + width + batch)
    draw = lambda *shape: torch.randn(*shape, generator=generator)  # noqa: E731
    return {
        "x": draw(batch, 4, height, width),
        "sigmas": torch.linspace(1, 0, case["steps"] + 1),
        "contexts": [draw(batch, text, 64) for text in texts],
        "extras": [{"y": draw(batch, 32), "guidance": torch.full((batch,), 3.5)} for _ in texts],
    }


def sample_request(case: dict[str, Any]) -> Sample:
    """The request of a case."""
    branches = tuple(ConditioningRef(number, index=number) for number in range(len(case.get("texts", [5]))))
    cfg = 3.0 if len(branches) == 2 else 1.0
    preview = bool(case.get("preview"))
    return Sample("m", case.get("sampler", "euler"), branches, cfg, preview=preview)


def run_cases(rank: int, world_size: int, cases: list[dict[str, Any]], compile: bool = False) -> dict[str, Any]:
    """Return {case name: finished latent} on rank 0, {} elsewhere, and what every rank's stage weighs."""
    meshes: dict[ParallelPlan, Any] = {}
    results: dict[str, Any] = {}
    for case in cases:
        plan = ParallelPlan(**case["plan"])
        if plan not in meshes:
            meshes[plan] = build_mesh(plan, rank, world_size)
        mesh = meshes[plan]
        if mesh is None:
            continue  # the plan does not use this rank
        dtype = getattr(torch, case.get("dtype", "float32"))
        transformer = copy.deepcopy(whole_transformer(dtype))
        stage = stage_of(transformer, FLUX, mesh, compile)
        inputs = make_inputs(case)
        branches = [
            Conditioning({"context": context.to(dtype), **extra})
            for context, extra in zip(inputs["contexts"], inputs["extras"], strict=True)
        ]
        with torch.no_grad():
            if case.get("forward"):
                runner = StageRunner(stage, branches[:1], inputs["x"], 1, keep=False)
                timestep = torch.full((inputs["x"].shape[0],), 0.7)
                result = forward_once(runner, inputs["x"], timestep)
            else:
                result = _sample(case, stage, branches, inputs, plan, dtype)
        if result is not None and rank == 0:
            results[case["name"]] = result
    return results


def _sample(
    case: dict[str, Any],
    stage: ParallelTransformer,
    branches: Any,
    inputs: Any,
    plan: ParallelPlan,
    dtype: torch.dtype,
) -> Any:
    denoising = Denoising(sample_request(case), dtype)
    runner = StageRunner(stage, branches, inputs["x"].to(dtype), plan.patches, keep=True)
    tensors = {"x": inputs["x"], "sigmas": inputs["sigmas"], "timesteps": inputs["sigmas"]}
    return PipelineDenoising(denoising, runner, plan.warmup_steps, tensors, Quiet()).run()


def run_in_turn(rank: int, world_size: int) -> dict[str, Any]:
    """One resident model, whole on both ranks: over heads, in stages, and so again."""
    inputs = make_inputs({"latent": (12, 6), "steps": 4})
    text = Conditioning({"context": inputs["contexts"][0], **inputs["extras"][0]})
    x, timestep = inputs["x"], torch.full((1,), 0.7)
    transformer = build_transformer(layers=LAYERS)
    facts = facts_of(transformer, FLUX)
    resident = Resident(
        DiffusersFamily(FLUX, dict(transformer.config)),
        Wish(ParallelConfig(devices="cpu:2"), 2, facts, TYPICAL, CPU, ParallelPlan()), torch.float32,
        WeightStore(torch.device("cpu"), rank), parallelize(transformer, FLUX, single_rank_mesh()),
    )  # fmt: skip
    meshes = Meshes(rank, world_size)
    outputs = {}
    staged = ParallelPlan(pipe=2, patches=2, warmup_steps=1)
    for number, plan in enumerate(2 * [ParallelPlan(ulysses=2), staged]):
        mesh = meshes.join(plan)
        assert mesh is not None
        network = resident.run_at(mesh)
        if mesh.links is None:
            output = Predictor(network, mesh)([Call(x, timestep, text)])[0]
        else:
            runner = StageRunner(network, [text], x, 1, keep=False)
            with torch.no_grad():
                output = forward_once(runner, x, timestep)
            assert resident.network is not None
            assert resident.network.stages.owned == ((0, 4), (4, 8))[rank]
        if rank == 0:
            outputs[str(number)] = output
    return outputs
