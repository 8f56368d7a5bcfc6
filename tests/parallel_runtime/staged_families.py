"""Families in stages, for the PipeFusion tests: one run on a pipeline, one in a single stage."""

from __future__ import annotations

from typing import Any

import torch

from benchmarks.lone_stage import LoneRunner, stage_of
from parallel_runtime.config import ParallelPlan
from parallel_runtime.denoising.denoise import Denoising
from parallel_runtime.mesh.mesh import build_mesh, single_rank_mesh
from parallel_runtime.networks.diffusers.parallel_transformer import ParallelTransformer
from parallel_runtime.pipefusion.denoise import PipelineDenoising
from parallel_runtime.pipefusion.runner import StageRunner
from parallel_runtime.requests.conditioning import Conditioning
from parallel_runtime.requests.requests import ConditioningRef, Sample
from tests.families import STAGED, Family, build
from tests.parallel_runtime.staged_run import Quiet
from tests.tiny_model import find_by_name

PATCHES, STEPS, WARMUP = 3, 4, 1


def run_family(family: Family, stage: ParallelTransformer, steps: int = STEPS) -> Any:
    """A few steps of euler; the latent on the first stage. Of a plan with one stage it is the only one."""
    extras = {name: value for name, value in family.call.items() if name not in ("x", "timestep")}
    x, sigmas = family.call["x"], torch.linspace(1, 0, steps + 1)
    denoising = Denoising(Sample("m", "euler", (ConditioningRef(0),), 1.0), torch.float32)
    branches = [Conditioning(extras)]
    if stage.mesh.plan.pipe == 1:
        runner: StageRunner = LoneRunner(stage, branches, x, PATCHES)
    else:
        runner = StageRunner(stage, branches, x, PATCHES, keep=True)
    tensors = {"x": x, "sigmas": sigmas, "timesteps": sigmas * 1000}
    return PipelineDenoising(denoising, runner, WARMUP, tensors, Quiet()).run()


def run_on_pipeline(rank: int, world_size: int, plans: dict[str, list[dict[str, int]]]) -> dict[str, Any]:
    """Run by `run_ranks`: family -> its plans; what the first stage has, on rank 0."""
    results = {}
    for name, degrees in plans.items():
        family = STAGED[name]
        spec = find_by_name(family.spec)
        for number, each in enumerate(degrees):
            plan = ParallelPlan(**each)
            mesh = build_mesh(plan, rank, world_size)
            assert mesh is not None
            latent = run_family(family, stage_of(build(family), spec, mesh))
            if rank == 0:
                results[f"{name} {number}"] = latent
    return results


def run_alone(family: Family, steps: int = STEPS) -> torch.Tensor:
    """The same patches with all blocks in one stage and one process."""
    stage = stage_of(build(family), find_by_name(family.spec), single_rank_mesh())
    return run_family(family, stage, steps)
