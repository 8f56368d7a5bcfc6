"""Our samplers beside the diffusers schedulers whose place they take, on the schedulers' own sigmas."""

from __future__ import annotations

import diffusers
import pytest
import torch

from parallel_runtime.errors import RequestError
from parallel_runtime.sampling.prediction import EPS, FLOW
from parallel_runtime.sampling.samplers import SAMPLERS
from parallel_runtime.sampling.schedulers import SAMPLER_OF, find_by_scheduler_class

SHAPE = (2, 3, 5, 4)
SEED = 21
BETAS = {"num_train_timesteps": 1000, "beta_start": 0.00085, "beta_end": 0.012, "beta_schedule": "scaled_linear"}


class Stream:
    """Noise of one generator, in the order in which it is asked for."""

    def __init__(self) -> None:
        self.generator = torch.Generator().manual_seed(SEED)

    def draw(self, like: torch.Tensor) -> torch.Tensor:
        return torch.randn(like.shape, generator=self.generator)


def eps(unit: torch.Tensor) -> torch.Tensor:
    """What the model makes of a latent of unit variance; smooth and nonlinear."""
    return torch.tanh(0.9 * unit + 0.5 * unit.roll(1, -1)) + 0.2 * unit


def start() -> torch.Tensor:
    return torch.randn(SHAPE, generator=torch.Generator().manual_seed(3))


def ours(scheduler, x: torch.Tensor, sigmas: torch.Tensor) -> torch.Tensor:
    """Our sampler for that class over `sigmas`, on the exploding scale."""
    sampler = find_by_scheduler_class(type(scheduler).__name__)

    def denoise(evaluation):
        seen, sigma = evaluation.x, evaluation.sigma
        return EPS.denoised(seen, eps(EPS.model_input(seen, sigma)), sigma)

    return sampler(denoise, x, sigmas, noise=Stream(), on_step=lambda state: None, prediction=EPS)


def assert_close(one: torch.Tensor, other: torch.Tensor) -> None:
    assert torch.isfinite(other).all()
    assert (one - other).abs().max() < 2e-5 * other.abs().max()


@pytest.mark.parametrize("shift", [1.0, 3.0])
def test_flow_match_euler(shift):
    scheduler = diffusers.FlowMatchEulerDiscreteScheduler(shift=shift)
    scheduler.set_timesteps(7)
    x = theirs = start()
    for timestep in scheduler.timesteps:
        theirs = scheduler.step(eps(theirs), timestep, theirs).prev_sample
    sampler = find_by_scheduler_class("FlowMatchEulerDiscreteScheduler")
    result = sampler(
        lambda evaluation: FLOW.denoised(evaluation.x, eps(evaluation.x), evaluation.sigma),
        x,
        scheduler.sigmas,
        noise=None,
        on_step=lambda state: None,
    )
    assert_close(result, theirs)


@pytest.mark.parametrize("karras", [False, True])
def test_schedulers_on_the_exploding_scale(karras):
    euler = diffusers.EulerDiscreteScheduler(**BETAS, use_karras_sigmas=karras)
    ancestral = diffusers.EulerAncestralDiscreteScheduler(**BETAS)
    heun = diffusers.HeunDiscreteScheduler(**BETAS, use_karras_sigmas=karras)
    for scheduler in (euler, ancestral, heun):
        scheduler.set_timesteps(7)
        x = theirs = start() * scheduler.init_noise_sigma
        generator = torch.Generator().manual_seed(SEED)
        given = {"generator": generator} if scheduler is ancestral else {}
        for timestep in scheduler.timesteps:
            output = eps(scheduler.scale_model_input(theirs, timestep))
            theirs = scheduler.step(output, timestep, theirs, **given).prev_sample
        # Heun lists each inner sigma twice, once for each evaluation.
        sigmas = scheduler.sigmas.unique(sorted=True).flip(0)
        assert len(sigmas) == 8
        assert_close(ours(scheduler, x, sigmas), theirs)


@pytest.mark.parametrize("karras", [False, True])
@pytest.mark.parametrize("steps", [3, 9])
def test_dpm_solver_multistep(steps, karras):
    scheduler = diffusers.DPMSolverMultistepScheduler(**BETAS, use_karras_sigmas=karras)
    scheduler.set_timesteps(steps)
    unit = theirs = start()
    for timestep in scheduler.timesteps:
        theirs = scheduler.step(eps(theirs), timestep, theirs).prev_sample
    stretch = (scheduler.sigmas[0] ** 2 + 1) ** 0.5
    assert_close(ours(scheduler, unit * stretch, scheduler.sigmas), theirs)


@pytest.mark.parametrize("name", ["DDIMScheduler", "DDPMScheduler"])
def test_schedulers_on_the_preserving_scale(name):
    scheduler = getattr(diffusers, name)(**BETAS, clip_sample=False)
    scheduler.set_timesteps(7)
    unit = theirs = start()
    generator = torch.Generator().manual_seed(SEED)
    for timestep in scheduler.timesteps:
        theirs = scheduler.step(eps(theirs), timestep, theirs, generator=generator).prev_sample
    kept = scheduler.alphas_cumprod[scheduler.timesteps]
    sigmas = torch.cat([((1 - kept) / kept) ** 0.5, torch.zeros(1)])
    assert_close(ours(scheduler, unit * (sigmas[0] ** 2 + 1) ** 0.5, sigmas), theirs)


def test_every_class_of_the_table_is_one_of_diffusers_and_has_a_sampler():
    for name, sampler in SAMPLER_OF.items():
        assert hasattr(diffusers, name)
        assert find_by_scheduler_class(name) is SAMPLERS[sampler]


def test_a_class_that_is_not_in_the_table_is_refused_with_those_that_are():
    with pytest.raises(RequestError, match="EDMEulerScheduler") as refusal:
        find_by_scheduler_class("EDMEulerScheduler")
    assert all(name in refusal.value.fix for name in SAMPLER_OF)
