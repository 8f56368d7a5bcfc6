"""Guidance, masks and whole runs against what is known in closed form; ComfyUI is not needed here."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from parallel_runtime.errors import RequestError
from parallel_runtime.sampling.denoiser import EPS, FLOW, V_PREDICTION, Denoiser, Inpaint, check_guidance
from parallel_runtime.sampling.samplers import SUPPORTED, Evaluation
from tests.parallel_runtime.sample_latent import SampleSettings, sample_latent, undo_scaling

FULL = (1.0, 0.93, 0.8, 0.55, 0.3, 0.1, 0.0)
PARTIAL = (0.62, 0.4, 0.15, 0.0)


def gaussian(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def velocities(x, timestep):
    t = timestep.view(-1, 1, 1, 1)
    return [torch.tanh(x * 1.3 + t), torch.sin(x - 0.4 * t)]


def evaluation(x: torch.Tensor, sigma: torch.Tensor) -> Evaluation:
    return Evaluation(x, sigma, 0)


def test_guidance_of_denoised_latents_is_guidance_of_velocities():
    x, sigma = gaussian(2, 3, 4, 4), torch.tensor(0.6)
    cond, uncond = velocities(x, (sigma * 1000).expand(2))
    guided = x - sigma * (uncond + (cond - uncond) * 3.5)
    denoised = Denoiser(velocities, FLOW, sigma[None] * 1000, 3.5)(evaluation(x, sigma))
    assert torch.allclose(denoised, guided, atol=1e-5)


def test_at_cfg_1_the_uncond_branch_plays_no_part():
    x, sigma = gaussian(1, 2, 2, 2), torch.tensor(0.5)
    outputs = [gaussian(1, 2, 2, 2, seed=1), torch.full_like(x, math.nan)]
    alone, both = (Denoiser(lambda *_, n=n: outputs[:n], FLOW, sigma[None])(evaluation(x, sigma)) for n in (1, 2))
    assert torch.equal(alone, x - outputs[0] * sigma)
    assert torch.equal(both, alone)


def test_a_guidance_without_the_branch_that_it_needs_is_refused():
    check_guidance(1, 1.0)
    check_guidance(2, 4.0)
    with pytest.raises(RequestError, match="needs a negative conditioning"):
        check_guidance(1, 1.01)


def test_a_half_precision_velocity_leaves_latent_and_timestep_in_float32():
    seen = []

    def predict(x, timestep):
        seen.append((x.dtype, timestep))
        return [x.to(torch.bfloat16)]

    x, sigma = gaussian(2, 1, 2, 2), torch.tensor(0.9046)
    denoised = Denoiser(predict, FLOW, sigma[None] * 1000)(evaluation(x, sigma))
    assert denoised.dtype == torch.float32
    assert torch.equal(denoised, x - x.to(torch.bfloat16).float() * sigma)
    dtype, timestep = seen[0]
    assert dtype == timestep.dtype == torch.float32
    assert torch.equal(timestep, torch.tensor([0.9046, 0.9046]) * 1000)


@pytest.mark.parametrize("sigma", [14.6, 1.0, 0.03])
@pytest.mark.parametrize("prediction", [FLOW, EPS, V_PREDICTION])
def test_a_perfect_output_gives_back_the_latent_from_any_noise_level(prediction, sigma):
    """On the scale of variance 1, eps is the noise and v its turn by a right angle (Salimans & Ho 2022)."""
    latent, noise, level = gaussian(2, 3, 4, 4), gaussian(2, 3, 4, 4, seed=1), torch.tensor(min(sigma, 1.0))
    if prediction is not FLOW:
        level = torch.tensor(sigma)
    signal, part = 1 / (level**2 + 1) ** 0.5, level / (level**2 + 1) ** 0.5
    output = {"flow": noise - latent, "eps": noise, "v_prediction": signal * noise - part * latent}[prediction.name]
    x = prediction.add_noise(latent, noise, level)
    seen = []

    def predict(model_input, timestep):
        seen.append((model_input, timestep))
        return [output]

    denoised = Denoiser(predict, prediction, torch.tensor([431.0]))(evaluation(x, level))
    torch.testing.assert_close(denoised, latent, atol=1e-5, rtol=1e-5)
    model_input, timestep = seen[0]
    assert torch.equal(timestep, torch.tensor([431.0, 431.0]))
    expected = x if prediction is FLOW else signal * latent + part * noise
    torch.testing.assert_close(model_input, expected, atol=1e-6, rtol=1e-6)


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
    seen = Inpaint(torch.zeros(1, 1, 1, 1), latent, noise).before(x, torch.tensor(sigma), FLOW)
    torch.testing.assert_close(seen, 0.3 * noise + 0.7 * latent)


def test_a_run_cut_in_two_gives_the_run_in_one():
    """As two KSampler Advanced nodes in a row: leftover noise out, no new noise in; euler has no memory."""
    inputs, how = sample_inputs(), SampleSettings("euler", cfg=2.0)
    whole = sample_latent(how, velocities, **inputs)
    first = sample_latent(how, velocities, **{**inputs, "sigmas": torch.tensor(FULL[:4])})
    none = torch.zeros_like(first)
    second = sample_latent(how, velocities, sigmas=torch.tensor(FULL[3:]), noise=none, latent_image=first)
    torch.testing.assert_close(second, whole, atol=1e-5, rtol=1e-5)


def test_undoing_the_scale_of_a_noised_latent_leaves_latent_plus_noise_ratio():
    latent, noise = gaussian(1, 1, 2, 2), gaussian(1, 1, 2, 2, seed=1)
    unscaled = undo_scaling(FLOW.add_noise(latent, noise, torch.tensor(0.4)), torch.tensor(0.4))
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


@pytest.mark.parametrize("field", ["cfg", "multiplier"])
def test_settings_that_are_not_finite_are_refused(field):
    values: dict[str, Any] = {field: math.nan}
    with pytest.raises(RequestError, match=field):
        SampleSettings("euler", **values)


def test_a_mask_keeps_what_is_noised_with_the_runs_own_noise():
    seen, inputs = [], sample_inputs()

    def predict(x, timestep):
        seen.append((x, timestep[0]))
        return straight(x, timestep)

    sample_latent(SampleSettings("euler"), predict, mask=torch.zeros(1, 1, 1, 1), **inputs)
    for x, sigma in seen:
        assert torch.equal(x, FLOW.add_noise(inputs["latent_image"], inputs["noise"], sigma))
