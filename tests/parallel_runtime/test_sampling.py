"""Samplers and their noise against what is known in closed form; ComfyUI is not needed here."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from parallel_runtime.errors import RequestError
from parallel_runtime.sampling.noise import NoiseSource
from parallel_runtime.sampling.prediction import EPS, FLOW
from parallel_runtime.sampling.samplers import SAMPLERS, SUPPORTED, find_sampler
from parallel_runtime.sampling.steps import Evaluation
from tests.parallel_runtime.sample_latent import mask_noise

DETERMINISTIC = tuple(name for name, sampler in SAMPLERS.items() if not sampler.adds_noise)
STOCHASTIC = tuple(name for name, sampler in SAMPLERS.items() if sampler.adds_noise)
UNI_PC = ("uni_pc", "uni_pc_bh2")
FULL = (1.0, 0.93, 0.8, 0.55, 0.3, 0.1, 0.0)
PARTIAL = (0.62, 0.4, 0.15, 0.0)
LEFTOVER = (1.0, 0.85, 0.6, 0.45)
"""Of KSampler Advanced that returns with leftover noise."""
ONE_STEP = (0.7, 0.0)
SCHEDULES = {"full": FULL, "partial": PARTIAL, "leftover": LEFTOVER, "one_step": ONE_STEP}


def gaussian(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def no_listener(evaluation: Evaluation, denoised: torch.Tensor) -> None:
    return None


def run(name, denoise, x, sigmas, on_step=no_listener, seed=3, prediction=FLOW):
    levels = torch.tensor(sigmas, dtype=x.dtype)

    def evaluate(evaluation):
        assert torch.equal(evaluation.sigma, levels[evaluation.level])
        return denoise(evaluation.x, evaluation.sigma)

    return SAMPLERS[name](evaluate, x, levels, noise=NoiseSource(seed), on_step=on_step, prediction=prediction)


class GaussianData:
    """Data N(mean, spread²): the ideal denoiser and the solution of the flow ODE are both known."""

    def __init__(self, mean: float, spread: float):
        self.mean, self.spread = mean, spread

    def variance(self, sigma):
        return self.spread**2 * (1 - sigma) ** 2 + sigma**2

    def denoise(self, x, sigma):
        gain = self.spread**2 * (1 - sigma) / self.variance(sigma)
        return self.mean + gain * (x - (1 - sigma) * self.mean)

    def solution(self, x, sigma_from: float, sigma_to: float):
        stretch = math.sqrt(self.variance(sigma_to) / self.variance(sigma_from))
        return (1 - sigma_to) * self.mean + stretch * (x - (1 - sigma_from) * self.mean)


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("name", DETERMINISTIC)
def test_one_possible_picture_is_reached_on_a_straight_line_whatever_the_steps(name, schedule):
    if name in UNI_PC and schedule == "one_step":
        pytest.skip("takes two steps at least, in ComfyUI too")
    data, sigmas = GaussianData(0.8, 0.0), SCHEDULES[schedule]
    x = gaussian(2, 4, 5, 3)
    result = run(name, data.denoise, x, sigmas)
    end = SAMPLERS[name].end_sigma(torch.tensor(sigmas)).item()
    # UniPC goes through logarithms of 1 - signal², which are short of digits near sigma 0.
    close = 2e-4 if name in UNI_PC else 2e-6
    torch.testing.assert_close(result, data.solution(x, sigmas[0], end), atol=close, rtol=1e-5)


# ddpm's chain is that of diffusion: on a flow's path it is defined, as in ComfyUI, but does not keep to it.
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("name", [name for name in STOCHASTIC if name != "ddpm"])
def test_samplers_that_add_noise_keep_the_noise_level_of_the_path(name, schedule):
    data, sigmas = GaussianData(0.8, 0.0), SCHEDULES[schedule]
    clean, count = torch.full((1, 4, 200, 200), 0.8), 160_000
    x = FLOW.add_noise(clean, gaussian(*clean.shape), torch.tensor(sigmas[0]))
    result = run(name, data.denoise, x, sigmas)
    if sigmas[-1] == 0:
        torch.testing.assert_close(result, clean, atol=1e-6, rtol=0)
    # Five standard errors of a mean and of a deviation over `count` values.
    assert abs(result.mean().item() - (1 - sigmas[-1]) * 0.8) <= 5 * sigmas[-1] / math.sqrt(count) + 1e-6
    assert abs(result.std().item() - sigmas[-1]) <= 5 * sigmas[-1] / math.sqrt(2 * count) + 1e-6


@pytest.mark.parametrize("name", STOCHASTIC)
def test_samplers_that_add_noise_keep_the_noise_level_of_the_diffusion_path(name):
    sigmas, count = (14.6, 9.0, 4.0, 1.5, 0.6), 160_000
    clean = torch.full((1, 4, 200, 200), 0.8)
    x = EPS.add_noise(clean, gaussian(*clean.shape), torch.tensor(sigmas[0]))
    result = run(name, lambda latent, sigma: clean, x, sigmas, prediction=EPS)
    assert abs(result.mean().item() - 0.8) <= 5 * sigmas[-1] / math.sqrt(count)
    assert abs(result.std().item() - sigmas[-1]) <= 5 * sigmas[-1] / math.sqrt(2 * count)


# UniPC's steps are of third order, but its last one is of the first, and so leaves an error of the second.
@pytest.mark.parametrize(
    ("name", "order"),
    [("euler", 1), ("ddim", 1), ("heun", 2), ("dpmpp_2m", 2), ("uni_pc", 2), ("uni_pc_bh2", 2)],
)
def test_halving_the_steps_divides_the_error_by_two_to_the_order(name, order):
    data, x = GaussianData(-0.4, 0.6), gaussian(1, 2, 4, 4, dtype=torch.float64)
    exact = data.solution(x, 0.95, 0.1)

    def error(steps: int) -> float:
        sigmas = torch.linspace(0.95, 0.1, steps + 1, dtype=torch.float64).tolist()
        return (run(name, data.denoise, x, sigmas) - exact).abs().max().item()

    measured = math.log2(error(128) / error(256))
    assert abs(measured - order) < 0.15


@settings(max_examples=30, deadline=None)
@given(
    name=st.sampled_from(SUPPORTED),
    levels=st.lists(st.integers(2, 1000), min_size=1, max_size=9, unique=True),
    ends_clean=st.booleans(),
)
def test_every_step_is_announced_once_before_it_is_taken(name, levels, ends_clean):
    sigmas = [level / 1000 for level in sorted(levels, reverse=True)] + [0.0] * ends_clean
    data, x = GaussianData(0.1, 0.5), gaussian(1, 2, 3, 3)
    evaluated: list[tuple[torch.Tensor, float]] = []
    seen: list[tuple[Evaluation, torch.Tensor]] = []

    def denoise(latent, sigma):
        evaluated.append((latent, sigma.item()))
        return data.denoise(latent, sigma)

    result = run(name, denoise, x, sigmas, lambda *step: seen.append(step))
    assert [evaluation.index for evaluation, _ in seen] == list(range(len(sigmas) - 1))
    assert [evaluation.sigma.item() for evaluation, _ in seen] == torch.tensor(sigmas[:-1]).tolist()
    for evaluation, denoised in seen:
        assert torch.equal(denoised, data.denoise(evaluation.x, evaluation.sigma))
    steps = len(sigmas) - 1
    extra = steps - ends_clean if name == "heun" and steps else 0
    assert len(evaluated) == steps + extra
    torch.testing.assert_close(seen[0][0].x if seen else result, x)
    if ends_clean and seen and name not in UNI_PC:
        torch.testing.assert_close(result, seen[-1][1], atol=1e-5, rtol=1e-5)


def test_what_on_step_raises_ends_the_run_before_the_next_evaluation():
    calls = []

    class Cancelled(BaseException):
        pass

    def stop(evaluation, denoised):
        if evaluation.index == 1:
            raise Cancelled

    def denoise(x, sigma):
        calls.append(sigma.item())
        return x * 0

    with pytest.raises(Cancelled):
        run("euler", denoise, gaussian(1, 1, 2, 2), FULL, stop)
    assert len(calls) == 2


def test_an_unknown_sampler_is_refused_with_what_there_is():
    with pytest.raises(RequestError) as refusal:
        find_sampler("dpm_adaptive")
    assert "'dpm_adaptive'" in str(refusal.value)
    assert all(name in str(refusal.value) for name in SUPPORTED)
    assert "per step" in refusal.value.fix
    assert find_sampler("heun") is SAMPLERS["heun"]


def test_the_table_of_samplers_cannot_be_changed():
    with pytest.raises(TypeError):
        SAMPLERS["euler"] = SAMPLERS["heun"]  # type: ignore[index]


def test_noise_on_the_cpu_starts_one_seed_later_and_goes_on_from_draw_to_draw():
    like, stream = torch.empty(2, 3, 4), torch.Generator().manual_seed(42)
    source = NoiseSource(41, "cpu", scale=2.0)
    for _ in range(3):
        assert torch.equal(source.draw(like), 2 * torch.randn(2, 3, 4, generator=stream))
    assert torch.equal(mask_noise(41, like), torch.randn(2, 3, 4, generator=torch.Generator().manual_seed(42)))


@pytest.mark.gpu  # where the rule for seeds is another one
def test_noise_on_a_gpu_starts_at_the_seed_and_moves_to_the_latent():
    stream = torch.Generator("cuda").manual_seed(41)
    expected = torch.randn(2, 3, 4, generator=stream, device="cuda")
    assert torch.equal(NoiseSource(41, "cuda").draw(torch.empty(2, 3, 4)), expected.cpu())


@pytest.mark.parametrize("seed", [-1, 2**64])
def test_a_seed_out_of_range_is_refused(seed):
    with pytest.raises(RequestError, match=str(seed)):
        NoiseSource(seed)


def test_the_largest_seed_has_no_successor_on_the_cpu():
    assert NoiseSource(2**64 - 2).draw(torch.empty(2)).shape == (2,)
    with pytest.raises(RequestError, match=str(2**64 - 1)):
        NoiseSource(2**64 - 1)
