"""The loop in the ranks against ComfyUI's own KSAMPLER, on its own schedules, with a small nonlinear model."""

from __future__ import annotations

import sys
from importlib import import_module
from types import MethodType, SimpleNamespace

import pytest
import torch

from parallel_runtime.sampling.samplers import SUPPORTED
from tests.comfyui_checkout import HOW, find_comfyui
from tests.parallel_runtime.sample_latent import SampleSettings, sample_latent

COMFYUI = find_comfyui()
if COMFYUI is None:
    pytest.skip(HOW, allow_module_level=True)
pytestmark = pytest.mark.host

SHAPE = (2, 4, 7, 9)
SEED = 1234
DEVICES = ["cpu", *["cuda"] * torch.cuda.is_available()]
SCHEDULES = {
    "simple_8": ("simple", 8, slice(None)),
    "simple_one_step": ("simple", 1, slice(None)),
    "beta_13": ("beta", 13, slice(None)),
    "normal_5": ("normal", 5, slice(None)),
    "ddim_uniform_6": ("ddim_uniform", 6, slice(None)),
    "denoise_0.6": ("simple", 10, slice(-7, None)),
    "denoise_one_step": ("beta", 10, slice(-2, None)),
    "leftover_noise": ("simple", 10, slice(0, 6)),
    "leftover_one_step": ("beta", 10, slice(3, 5)),
    "middle": ("simple", 20, slice(7, 15)),
}


@pytest.fixture(scope="module")
def comfy():
    """ComfyUI's modules, imported from a checkout without starting a server."""
    # At the end, and only for the import: its root has a nodes.py that must not stand in for ours.
    sys.path.append(str(COMFYUI))
    try:
        import_module("comfy.cli_args").args.cpu = True
        samplers, base = import_module("comfy.samplers"), import_module("comfy.model_base")
    finally:
        sys.path.remove(str(COMFYUI))
    return SimpleNamespace(samplers=samplers, model_base=base)


def flow_sampling(comfy, model_type: str, noise_scale: float = 1.0):
    """ComfyUI's model sampling of a family: FLUX (shift 1.15, timestep = sigma) or SD3 (shift 3, times 1000)."""
    settings = {"FLUX": {}, "FLOW": {"shift": 3.0, "multiplier": 1000}}[model_type]
    config = SimpleNamespace(sampling_settings=settings)
    sampling = comfy.model_base.model_sampling(config, comfy.model_base.ModelType[model_type])
    sampling.noise_scale = noise_scale
    return sampling


def predict(x: torch.Tensor, timestep: torch.Tensor) -> list[torch.Tensor]:
    """Two branches of a smooth, nonlinear, position-dependent velocity that leans on the timestep."""
    t = timestep.view(-1, *[1] * (x.ndim - 1)) / timestep.max().clamp(min=1.0)
    mixed = x + 0.5 * x.roll(1, -1) - 0.3 * x.roll(2, -2)
    return [torch.tanh(0.9 * mixed + t) + 0.4 * x, torch.sin(mixed - 2 * t) + 0.3 * x]


class HostGuider:
    """What KSAMPLER takes for a guider, with ComfyUI's model sampling, CFG and inpaint scaling around `predict`."""

    def __init__(self, comfy, sampling, cfg: float):
        self.comfy, self.sampling, self.cfg = comfy, sampling, cfg
        self.inner_model = SimpleNamespace(model_sampling=sampling)
        scale = comfy.model_base.BaseModel.scale_latent_inpaint
        self.inner_model.scale_latent_inpaint = MethodType(scale, self.inner_model)
        self.model_patcher = SimpleNamespace(get_model_object={"model_sampling": sampling}.get, model=sampling)

    def evaluate(self, args):
        x, sigma = args["input"], args["sigma"]
        timestep = self.sampling.timestep(sigma).float()
        velocity = predict(self.sampling.calculate_input(sigma, x), timestep)
        return [
            torch.zeros_like(x) if cond is None else self.sampling.calculate_denoised(sigma, branch, x)
            for cond, branch in zip(args["conds"], velocity, strict=True)
        ]

    def __call__(self, x, sigma, model_options, seed):
        options = {"sampler_calc_cond_batch_function": self.evaluate}
        return self.comfy.samplers.sampling_function(self, x, sigma, [{}], [{}], self.cfg, model_options=options)


def latents(device: str) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Start noise, input latent and a soft mask."""
    stream = torch.Generator().manual_seed(SEED)
    noise, latent = (torch.randn(SHAPE, generator=stream).to(device) for _ in range(2))
    return noise, latent, torch.rand(SHAPE, generator=stream).round(decimals=1).to(device)


def both(comfy, name, sigmas, *, device="cpu", model_type="FLUX", cfg=1.0, noise_scale=1.0, masked=False):
    """Run ComfyUI and us on the same inputs; return both results and both lists of (index, x, denoised)."""
    noise, latent, mask = latents(device)
    sampling = flow_sampling(comfy, model_type, noise_scale).to(device)
    their_steps: list[tuple[int, torch.Tensor, torch.Tensor]] = []
    theirs = comfy.samplers.sampler_object(name).sample(
        HostGuider(comfy, sampling, cfg),
        sigmas.to(device),
        {"seed": SEED, "model_options": {}},
        lambda index, denoised, x, total: their_steps.append((index, x.clone(), denoised.clone())),
        noise,
        latent,
        mask if masked else None,
        True,
    )
    our_steps: list[tuple[int, torch.Tensor, torch.Tensor]] = []
    multiplier = 1000.0 if model_type == "FLOW" else 1.0
    ours = sample_latent(
        SampleSettings(name, SEED, cfg, device, multiplier, noise_scale),
        predict,
        sigmas=sigmas,
        noise=noise,
        latent_image=latent,
        mask=mask if masked else None,
        on_step=lambda state: our_steps.append((state.index, state.x, state.denoised)),
    )
    return theirs, ours, their_steps, our_steps


def assert_same(theirs, ours, their_steps, our_steps):
    """Within 1e-5 at the end and at every callback. Not a bit is expected to differ, but other torches may."""
    assert torch.isfinite(theirs).all()
    assert (ours - theirs).abs().max().item() < 1e-5
    assert [step[0] for step in our_steps] == [step[0] for step in their_steps]
    for (_, our_x, our_denoised), (_, their_x, their_denoised) in zip(our_steps, their_steps, strict=True):
        assert (our_x - their_x).abs().max().item() < 1e-5
        assert (our_denoised - their_denoised).abs().max().item() < 1e-5


def schedule(comfy, name: str, model_type: str = "FLUX") -> torch.Tensor:
    scheduler, steps, part = SCHEDULES[name]
    return comfy.samplers.calculate_sigmas(flow_sampling(comfy, model_type), scheduler, steps)[part]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("model_type", ["FLUX", "FLOW"])
@pytest.mark.parametrize("schedule_name", SCHEDULES)
@pytest.mark.parametrize("name", SUPPORTED)
def test_sampler_gives_what_comfyui_gives_on_its_schedules(comfy, name, schedule_name, model_type, device):
    sigmas = schedule(comfy, schedule_name, model_type)
    assert_same(*both(comfy, name, sigmas, model_type=model_type, device=device))


@pytest.mark.parametrize("cfg", [1.0, 1.0 + 1e-12, 0.0, 4.0])
@pytest.mark.parametrize("name", SUPPORTED)
def test_guidance_gives_what_comfyui_gives(comfy, name, cfg):
    assert_same(*both(comfy, name, schedule(comfy, "simple_8"), cfg=cfg))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("schedule_name", ["simple_8", "denoise_0.6", "leftover_noise"])
@pytest.mark.parametrize("name", SUPPORTED)
def test_inpainting_gives_what_comfyui_gives(comfy, name, schedule_name, device):
    assert_same(*both(comfy, name, schedule(comfy, schedule_name), cfg=2.5, masked=True, device=device))


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("name", SUPPORTED)
def test_a_noise_scale_gives_what_comfyui_gives(comfy, name, masked):
    assert_same(*both(comfy, name, schedule(comfy, "simple_8"), noise_scale=1.7, masked=masked))


def test_ddim_differs_from_euler_under_a_mask_only(comfy):
    sigmas = schedule(comfy, "simple_8")
    euler, ddim = (both(comfy, name, sigmas)[1] for name in ("euler", "ddim"))
    assert torch.equal(euler, ddim)
    euler, ddim = (both(comfy, name, sigmas, masked=True)[1] for name in ("euler", "ddim"))
    assert not torch.allclose(euler, ddim, atol=1e-3)
