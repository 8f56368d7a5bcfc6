"""Ranks whose devices compute otherwise sample the picture of the first of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from parallel_runtime.config import ParallelConfig
from parallel_runtime.denoising import denoise
from parallel_runtime.engine import rank_state
from parallel_runtime.engine.engine import Engine
from parallel_runtime.requests.conditioning import refer
from parallel_runtime.requests.requests import Load, Sample
from parallel_runtime.sampling.samplers import euler
from tests.parallel_runtime.staged_run import Quiet
from tests.ranks import run_ranks
from tests.tiny_flux import tiny_config, write_diffusers_folder

CPU = torch.device("cpu")
PLANS = [{"ulysses": 2, "cfg": 2}, {"data": 2, "ulysses": 2}, {"pipe": 2, "ulysses": 2, "patches": 1}]


def make_request(branches: int) -> tuple[Sample, dict[str, torch.Tensor]]:
    """A run with one or two CFG branches, on a batch of two."""
    generator = torch.Generator().manual_seed(3)
    tensors = {"x": torch.randn(2, 16, 6, 4, generator=generator)}
    tensors["sigmas"] = tensors["timesteps"] = torch.linspace(1, 0, 5)
    references = []
    for index in range(branches):
        given = {
            "context": torch.randn(1, 5, 64, generator=generator),
            "y": torch.randn(1, 32, generator=generator),
            "guidance": torch.full((1,), 3.5),
        }
        reference, named = refer(index + 1, given, index)
        tensors |= named
        references.append(reference)
    return Sample("m", "euler", tuple(references), 3.0 if branches > 1 else 1.0), tensors


def sample(engine: Engine, path: str, degrees: dict[str, int], branches: int) -> torch.Tensor | None:
    config = ParallelConfig(devices=f"cpu:{engine.world_size}", **degrees)
    load = Load("m", path, "float32", config.to_mapping(), engine.world_size)
    engine.prepare(load, {}, Quiet()).run({}, Quiet())
    request, tensors = make_request(branches)
    prepared = engine.prepare(request, {name: tensor.to("meta") for name, tensor in tensors.items()}, Quiet())
    with torch.no_grad():
        return prepared.run(tensors, Quiet())[1].get("latent")


def sample_with_other_steps(rank: int, world_size: int, path: str) -> dict[str, Any]:
    """Run by `run_ranks`: the ranks beside the first of their stage step otherwise."""
    expected = [sample(Engine(CPU, 0, 1), path, {}, 2 if "cfg" in plan else 1) for plan in PLANS]
    rank_state.compare_devices = lambda *_: (True, [1.0, 0.5, 1.0, 0.5])
    engine = Engine(CPU, rank, world_size)
    errors = []
    for plan, wanted in zip(PLANS, expected, strict=True):
        first = rank == 0 or ("pipe" in plan and rank == 2)
        change = 0.0 if first else 0.1 * rank
        denoise.SAMPLERS = {"euler": lambda *step, change=change: euler(*step) + change}
        latent = sample(engine, path, plan, 2 if "cfg" in plan else 1)
        if rank == 0:
            errors.append(float((latent - wanted).abs().max() / wanted.abs().max()))
    return {"errors": errors}


@pytest.mark.slow
def test_the_picture_is_that_of_the_first_device_whatever_the_others_make_of_a_step(tmp_path):
    path: Path = write_diffusers_folder(tmp_path / "tiny", tiny_config(num_layers=1, num_single_layers=1))
    results = run_ranks(4, f"{__name__}:sample_with_other_steps", {"path": str(path)})
    assert len(results[0]["errors"]) == len(PLANS)
    assert max(results[0]["errors"]) < 1e-5
