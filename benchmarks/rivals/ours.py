"""Parallel DiT: Ulysses, ring, PipeFusion, and PipeFusion x Ulysses.

It is the loop that the pool's ranks run, previews included, without the way to the client.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from parallel_runtime.config import ParallelPlan
from parallel_runtime.denoising.denoise import Denoising
from parallel_runtime.denoising.predict import Predictor
from parallel_runtime.engine.rank_state import Meshes
from parallel_runtime.exchange.head_routes import HeadRoutes
from parallel_runtime.mesh.mesh import Mesh
from parallel_runtime.networks.diffusers.flux import FLUX
from parallel_runtime.networks.diffusers.parallel_transformer import parallelize
from parallel_runtime.pipefusion.denoise import PipelineDenoising
from parallel_runtime.pipefusion.runner import StageRunner
from parallel_runtime.requests.conditioning import Conditioning
from parallel_runtime.requests.requests import ConditioningRef, Sample

from ..lone_stage import stage_of
from ..step_control import StepControl
from .case import Case
from .measure import Engine, main
from .task import Sampling, Task


def plan_for(case: Case) -> ParallelPlan:
    """The plan of a case's split over all of its ranks; of a pipeline with as many patches as stages."""
    ranks = case.ranks
    if case.split == "pipefusion":
        return ParallelPlan(pipe=ranks, patches=ranks, warmup_steps=1)
    if case.split == "pipefusion-ulysses":
        return ParallelPlan(pipe=2, ulysses=ranks // 2, patches=2, warmup_steps=1)
    return ParallelPlan(ring=ranks) if case.split == "ring" else ParallelPlan(ulysses=ranks)


def build(task: Task) -> Engine:
    """Compiled or not, with CUDA graphs, as a pool's ranks would."""
    from diffusers import FluxTransformer2DModel

    plan = plan_for(task.case)
    mesh = Meshes(task.rank, task.case.ranks, share=HeadRoutes).join(plan)
    assert mesh is not None, "the plan uses every rank"
    module = task.build(FluxTransformer2DModel)
    text = Conditioning(task.conditioning())
    request = Sample("model", "euler", (ConditioningRef(0),), 1.0, preview=True)
    denoising = Denoising(request, task.dtype)
    build_sample = _build_stage if plan.pipe > 1 else _build_sequence
    sample, attention = build_sample(module, plan, mesh, denoising, text, bool(task.case.compile))
    return Engine(sample, f"{plan}, {attention} attention")


def _build_sequence(
    module: Any, plan: ParallelPlan, mesh: Mesh, denoising: Denoising, text: Conditioning, compile: bool
) -> tuple[Sampling, str]:
    transformer = parallelize(module, FLUX, mesh, compile=compile)
    predictor = Predictor(transformer, mesh)

    def sample(x: torch.Tensor, sigmas: torch.Tensor, tick: Callable[[], None]) -> torch.Tensor:
        tensors = {"x": x, "sigmas": sigmas.cpu(), "timesteps": sigmas}
        control = StepControl(x.device, tick)
        latent = denoising.run(predictor, [text], tensors, control)
        control.finish()
        return latent

    return sample, transformer.attention


def _build_stage(
    module: Any, plan: ParallelPlan, mesh: Mesh, denoising: Denoising, text: Conditioning, compile: bool
) -> tuple[Sampling, str]:
    stage = stage_of(module, FLUX, mesh, compile=compile)

    def sample(x: torch.Tensor, sigmas: torch.Tensor, tick: Callable[[], None]) -> torch.Tensor:
        tensors = {"x": x, "sigmas": sigmas.cpu(), "timesteps": sigmas}
        seen = denoising.model_inputs(x, tensors)[0]
        runner = StageRunner(stage, [text], seen, plan.patches, keep=True)
        control = StepControl(x.device, tick)
        latent = PipelineDenoising(denoising, runner, plan.warmup_steps, tensors, control).run()
        control.finish()
        return x if latent is None else latent  # only the first stage has it, and only rank 0's is looked at

    return sample, stage.attention


if __name__ == "__main__":
    main(build)
