"""Samplers against what is known in closed form; ComfyUI is not needed here."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from parallel_runtime.sampling.samplers import SAMPLERS, SUPPORTED, Evaluation, run_steps

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


def run(name, denoise, x, sigmas, on_step=no_listener):
    levels = torch.tensor(sigmas, dtype=x.dtype)

    def evaluate(evaluation):
        assert torch.equal(evaluation.sigma, levels[evaluation.index])
        return denoise(evaluation.x, evaluation.sigma)

    return run_steps(SAMPLERS[name], evaluate, x, levels, on_step)


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
@pytest.mark.parametrize("name", SUPPORTED)
def test_one_possible_picture_is_reached_on_a_straight_line_whatever_the_steps(name, schedule):
    data, sigmas = GaussianData(0.8, 0.0), SCHEDULES[schedule]
    x = gaussian(2, 4, 5, 3)
    result = run(name, data.denoise, x, sigmas)
    torch.testing.assert_close(result, data.solution(x, sigmas[0], sigmas[-1]), atol=2e-6, rtol=1e-5)


@pytest.mark.parametrize(("name", "order"), [("euler", 1), ("dpmpp_2m", 2)])
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
    assert len(evaluated) == len(sigmas) - 1
    torch.testing.assert_close(seen[0][0].x if seen else result, x)
    if ends_clean and seen:
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


def test_the_table_of_samplers_cannot_be_changed():
    with pytest.raises(TypeError):
        SAMPLERS["euler"] = SAMPLERS["dpmpp_2m"]  # type: ignore[index]
