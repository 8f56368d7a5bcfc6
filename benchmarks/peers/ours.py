"""Parallel DiT: the loop that the pool's ranks run, previews included, without the way to the client (flux_step.py)."""

from __future__ import annotations

from collections.abc import Callable

import torch

from parallel_runtime.config import ParallelPlan
from parallel_runtime.mesh import build_mesh, single_rank_mesh
from parallel_runtime.models.flux import FLUX
from parallel_runtime.pipeline.conditioning import Conditioning
from parallel_runtime.pipeline.denoise import Denoising
from parallel_runtime.pipeline.predict import Predictor
from parallel_runtime.pipeline.requests import ConditioningRef, Sample
from parallel_runtime.wrappers.parallel_transformer import parallelize

from ..step_control import StepControl
from .measure import Engine, main
from .task import Task


def build(task: Task) -> Engine:
    """Ulysses over all ranks."""
    from diffusers import FluxTransformer2DModel

    mesh = single_rank_mesh()
    if task.case.ranks > 1:
        planned = build_mesh(ParallelPlan(ulysses=task.case.ranks), task.device.type, task.rank, task.case.ranks)
        assert planned is not None, "the plan uses every rank"
        mesh = planned
    module = task.build(FluxTransformer2DModel)
    assert FLUX.prepare is not None
    FLUX.prepare(module)
    transformer = parallelize(module, FLUX, mesh, compile=bool(task.case.compile))
    predictor, text = Predictor(transformer, FLUX, mesh), Conditioning(task.conditioning())
    request = Sample("model", "euler", (ConditioningRef(0),), 1.0, seed=0, noise_device=task.device.type, preview=True)
    denoising = Denoising(request, task.dtype)

    def sample(x: torch.Tensor, sigmas: torch.Tensor, tick: Callable[[], None]) -> torch.Tensor:
        tensors = {"x": x, "sigmas": sigmas.cpu(), "timesteps": sigmas}
        control = StepControl(task.device, tick)
        latent = denoising.run(predictor, [text], tensors, control)
        control.finish()
        return latent

    return Engine(sample, f"{mesh.plan}, {transformer.attention} attention")


if __name__ == "__main__":
    main(build)
