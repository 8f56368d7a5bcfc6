"""Parallel DiT: the loop that the pool's ranks run, without the client's round trip (that is in flux_step.py)."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist

from parallel_runtime.config import ParallelPlan
from parallel_runtime.mesh import build_mesh, single_rank_mesh
from parallel_runtime.models.flux import FLUX
from parallel_runtime.pipeline.conditioning import Conditioning
from parallel_runtime.pipeline.denoise import Denoising
from parallel_runtime.pipeline.predict import Predictor
from parallel_runtime.pipeline.requests import ConditioningRef, Sample
from parallel_runtime.wrappers.parallel_transformer import parallelize

from .measure import Engine, main
from .task import Task


class StepControl:
    """A control that ticks after every step, and agrees on going on as the pool's ranks do."""

    def __init__(self, tick: Callable[[], None]) -> None:
        self.tick = tick

    def progress(self, step: int, total: int, denoised: torch.Tensor | None = None) -> None:
        """A step is through."""
        self.tick()

    def check_cancel(self) -> None:
        """Nobody cancels."""

    def vote_stop(self) -> Callable[[], bool]:
        """Collective where there are several ranks."""
        decision = torch.zeros(1, dtype=torch.uint8)
        work = dist.broadcast(decision, src=0, async_op=True) if dist.is_initialized() else None
        return lambda: (work is None or work.wait()) and bool(decision.item())

    def all_stop(self) -> bool:
        """The same at once."""
        return self.vote_stop()()


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
    request = Sample("model", "euler", (ConditioningRef(0),), 1.0, seed=0, noise_device=task.device.type)
    denoising = Denoising(request, task.dtype)

    def sample(x: torch.Tensor, sigmas: torch.Tensor, tick: Callable[[], None]) -> torch.Tensor:
        tensors = {"x": x, "sigmas": sigmas.cpu(), "timesteps": sigmas}
        return denoising.run(predictor, [text], tensors, StepControl(tick))

    return Engine(sample, f"{mesh.plan}, {transformer.attention} attention")


if __name__ == "__main__":
    main(build)
