"""The sampling loop against what is known in closed form; ComfyUI is not needed here."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from parallel_runtime.errors import RequestError
from parallel_runtime.sampling.denoiser import FlowDenoiser, Inpaint, combine_branches, needs_uncond
from parallel_runtime.sampling.flow import add_noise, undo_scaling
from parallel_runtime.sampling.noise import NoiseSource, mask_noise
from parallel_runtime.sampling.sample import SampleSettings, sample_latent
from parallel_runtime.sampling.samplers import SAMPLERS, SUPPORTED, StepState, find_sampler

DETERMINISTIC = tuple(name for name, sampler in SAMPLERS.items() if not sampler.adds_noise)
STOCHASTIC = tuple(name for name, sampler in SAMPLERS.items() if sampler.adds_noise)
FULL = (1.0, 0.93, 0.8, 0.55, 0.3, 0.1, 0.0)
PARTIAL = (0.62, 0.4, 0.15, 0.0)
LEFTOVER = (1.0, 0.85, 0.6, 0.45)
"""Of KSampler Advanced that returns with leftover noise."""
ONE_STEP = (0.7, 0.0)
SCHEDULES = {"full": FULL, "partial": PARTIAL, "leftover": LEFTOVER, "one_step": ONE_STEP}


def gaussian(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def no_listener(state: StepState) -> None:
    return None


def run(name, denoise, x, sigmas, on_step=no_listener, seed=3):
    levels = torch.tensor(sigmas, dtype=x.dtype)
    return SAMPLERS[name](denoise, x, levels, noise=NoiseSource(seed), on_step=on_step)


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
    data, sigmas = GaussianData(0.8, 0.0), SCHEDULES[schedule]
    x = gaussian(2, 4, 5, 3)
    result = run(name, data.denoise, x, sigmas)
    torch.testing.assert_close(result, data.solution(x, sigmas[0], sigmas[-1]), atol=2e-6, rtol=1e-5)


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("name", STOCHASTIC)
def test_samplers_that_add_noise_keep_the_noise_level_of_the_path(name, schedule):
    data, sigmas = GaussianData(0.8, 0.0), SCHEDULES[schedule]
    clean, count = torch.full((1, 4, 200, 200), 0.8), 160_000
    x = add_noise(clean, gaussian(*clean.shape), torch.tensor(sigmas[0]))
    result = run(name, data.denoise, x, sigmas)
    if sigmas[-1] == 0:
        torch.testing.assert_close(result, clean, atol=1e-6, rtol=0)
    # Five standard errors of a mean and of a deviation over `count` values.
    assert abs(result.mean().item() - (1 - sigmas[-1]) * 0.8) <= 5 * sigmas[-1] / math.sqrt(count) + 1e-6
    assert abs(result.std().item() - sigmas[-1]) <= 5 * sigmas[-1] / math.sqrt(2 * count) + 1e-6


@pytest.mark.parametrize(("name", "order"), [("euler", 1), ("ddim", 1), ("heun", 2), ("dpmpp_2m", 2)])
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
    levels=st.lists(st.integers(1, 1000), min_size=1, max_size=9, unique=True),
    ends_clean=st.booleans(),
)
def test_every_step_is_announced_once_before_it_is_taken(name, levels, ends_clean):
    sigmas = [level / 1000 for level in sorted(levels, reverse=True)] + [0.0] * ends_clean
    data, x = GaussianData(0.1, 0.5), gaussian(1, 2, 3, 3)
    evaluated: list[tuple[torch.Tensor, float]] = []
    seen: list[StepState] = []

    def denoise(latent, sigma):
        evaluated.append((latent, sigma.item()))
        return data.denoise(latent, sigma)

    result = run(name, denoise, x, sigmas, seen.append)
    assert [state.index for state in seen] == list(range(len(sigmas) - 1))
    assert [state.sigma for state in seen] == torch.tensor(sigmas[:-1]).tolist()
    for state in seen:
        assert torch.equal(state.denoised, data.denoise(state.x, torch.tensor(state.sigma)))
    steps = len(sigmas) - 1
    extra = steps - ends_clean if name == "heun" and steps else 0
    assert len(evaluated) == steps + extra
    assert (seen[0].x if seen else result) is x
    if ends_clean and seen:
        torch.testing.assert_close(result, seen[-1].denoised, atol=1e-5, rtol=1e-5)


def test_what_on_step_raises_ends_the_run_before_the_next_evaluation():
    calls = []

    class Cancelled(BaseException):
        pass

    def stop(state):
        if state.index == 1:
            raise Cancelled

    def denoise(x, sigma):
        calls.append(sigma.item())
        return x * 0

    with pytest.raises(Cancelled):
        run("euler", denoise, gaussian(1, 1, 2, 2), FULL, stop)
    assert len(calls) == 2


def test_an_unknown_sampler_is_refused_with_what_there_is():
    with pytest.raises(RequestError) as refusal:
        find_sampler("uni_pc")
    assert "'uni_pc'" in str(refusal.value)
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


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU: the seed rule there is another one")
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


def test_a_device_that_is_not_there_is_refused_only_by_samplers_that_draw_on_it():
    inputs = sample_inputs()
    with pytest.raises(RequestError, match="no such device"):
        sample_latent(SampleSettings("euler_ancestral", noise_device="xpu"), straight, **inputs)
    sample_latent(SampleSettings("euler", noise_device="xpu"), straight, **inputs)


def velocities(x, timestep):
    t = timestep.view(-1, 1, 1, 1)
    return [torch.tanh(x * 1.3 + t), torch.sin(x - 0.4 * t)]


def test_guidance_of_denoised_latents_is_guidance_of_velocities():
    x, sigma = gaussian(2, 3, 4, 4), torch.tensor(0.6)
    cond, uncond = velocities(x, (sigma * 1000).expand(2))
    guided = x - sigma * (uncond + (cond - uncond) * 3.5)
    assert torch.allclose(FlowDenoiser(velocities, 3.5, multiplier=1000.0)(x, sigma), guided, atol=1e-5)


def test_at_cfg_1_the_uncond_branch_plays_no_part():
    cond, broken = gaussian(1, 2, 2, 2), torch.full((1, 2, 2, 2), math.nan)
    assert not needs_uncond(1.0)
    assert needs_uncond(1.01)
    assert combine_branches([cond, broken], 1.0) is cond
    assert combine_branches([cond], 1.0) is cond


@pytest.mark.parametrize("branches", [0, 1, 3])
def test_branches_that_do_not_fit_the_guidance_are_refused(branches):
    with pytest.raises(RequestError):
        combine_branches([torch.zeros(1)] * branches, 4.0)


def test_a_half_precision_velocity_leaves_latent_and_timestep_in_float32():
    seen = []

    def predict(x, timestep):
        seen.append((x.dtype, timestep))
        return [x.to(torch.bfloat16)]

    x, sigma = gaussian(2, 1, 2, 2), torch.tensor(0.9046)
    denoised = FlowDenoiser(predict, multiplier=1000.0)(x, sigma)
    assert denoised.dtype == torch.float32
    assert torch.equal(denoised, x - x.to(torch.bfloat16).float() * sigma)
    dtype, timestep = seen[0]
    assert dtype == timestep.dtype == torch.float32
    assert torch.equal(timestep, torch.tensor([0.9046, 0.9046]) * 1000)


def straight(x, timestep):
    """Velocity towards a picture of 0.5 everywhere."""
    return [(x - 0.5) / timestep.view(-1, 1, 1, 1)]


def sample_inputs(sigmas=FULL) -> dict[str, Any]:
    shape = (1, 2, 4, 6)
    return {"sigmas": torch.tensor(sigmas), "noise": gaussian(*shape), "latent_image": gaussian(*shape, seed=1)}


@pytest.mark.parametrize("name", SUPPORTED)
def test_a_mask_keeps_the_latent_outside_and_denoises_inside(name):
    inputs = sample_inputs()
    mask = torch.zeros(1, 1, 4, 6)
    mask[..., :3] = 1
    result = sample_latent(SampleSettings(name), straight, mask=mask, **inputs)
    torch.testing.assert_close(result[..., 3:], inputs["latent_image"][..., 3:], atol=1e-6, rtol=0)
    torch.testing.assert_close(result[..., :3], torch.full((1, 2, 4, 3), 0.5), atol=1e-5, rtol=0)


@pytest.mark.parametrize("name", SUPPORTED)
def test_a_mask_of_ones_changes_nothing(name):
    inputs = sample_inputs(PARTIAL)

    def predict(x, timestep):
        return velocities(x, timestep)[:1]

    plain = sample_latent(SampleSettings(name), predict, **inputs)
    assert torch.equal(sample_latent(SampleSettings(name), predict, mask=torch.ones(1, 1, 4, 6), **inputs), plain)


def test_the_model_sees_the_kept_part_at_the_noise_level_of_the_step():
    latent, noise, x, sigma = gaussian(1, 1, 2, 2), gaussian(1, 1, 2, 2, seed=1), torch.zeros(1, 1, 2, 2), 0.3
    seen = Inpaint(torch.zeros(1, 1, 1, 1), latent, noise).before(x, torch.tensor(sigma))
    torch.testing.assert_close(seen, 0.3 * noise + 0.7 * latent)


@pytest.mark.parametrize("name", ["euler", "ddim", "heun"])
def test_a_run_cut_in_two_gives_the_run_in_one(name):
    """As two KSampler Advanced nodes in a row: leftover noise out, no new noise in; these samplers have no memory."""
    inputs, how = sample_inputs(), SampleSettings(name, cfg=2.0)
    whole = sample_latent(how, velocities, **inputs)
    first = sample_latent(how, velocities, **{**inputs, "sigmas": torch.tensor(FULL[:4])})
    none = torch.zeros_like(first)
    second = sample_latent(how, velocities, sigmas=torch.tensor(FULL[3:]), noise=none, latent_image=first)
    torch.testing.assert_close(second, whole, atol=1e-5, rtol=1e-5)


def test_undoing_the_scale_of_a_noised_latent_leaves_latent_plus_noise_ratio():
    latent, noise = gaussian(1, 1, 2, 2), gaussian(1, 1, 2, 2, seed=1)
    unscaled = undo_scaling(add_noise(latent, noise, torch.tensor(0.4)), torch.tensor(0.4))
    torch.testing.assert_close(unscaled, latent + noise * 0.4 / 0.6)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"noise": torch.full((1, 2, 4, 6), math.nan)}, "noise .* NaN"),
        ({"latent_image": torch.full((1, 2, 4, 6), math.inf)}, "latent .* NaN"),
        ({"sigmas": torch.tensor([math.nan, 0.0])}, "sigmas .* NaN"),
        ({"sigmas": torch.tensor([0.8, 0.0, 0.0])}, "before their end"),
        ({"sigmas": torch.tensor([0.8, -0.1])}, "0 or below"),
        ({"sigmas": torch.tensor([])}, "no schedule"),
        ({"latent_image": torch.zeros(1, 3, 4, 6)}, "shape"),
        ({"mask": torch.ones(4, 6)}, "mask has shape"),
    ],
)
def test_inputs_that_could_only_give_nan_are_refused_before_the_first_evaluation(change, words):
    def never(x, timestep):
        raise AssertionError("the transformer was called")

    with pytest.raises(RequestError, match=words):
        sample_latent(SampleSettings("euler"), never, **{**sample_inputs(), **change})


@pytest.mark.parametrize("field", ["cfg", "multiplier", "noise_scale"])
def test_settings_that_are_not_finite_are_refused(field):
    values: dict[str, Any] = {field: math.nan}
    with pytest.raises(RequestError, match=field):
        SampleSettings("euler", **values)
