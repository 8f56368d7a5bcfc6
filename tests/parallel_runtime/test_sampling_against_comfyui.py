"""The loop in the ranks against ComfyUI's own KSAMPLER, on its own schedules, with a small nonlinear model."""

from __future__ import annotations

from importlib import import_module
from types import MethodType, SimpleNamespace

import pytest
import torch

from parallel_runtime.config import ParallelConfig
from parallel_runtime.sampling.denoiser import PREDICTIONS, Denoiser, Inpaint
from parallel_runtime.sampling.samplers import SAMPLERS, SUPPORTED, run_steps
from tests.comfyui_checkout import HOW, find_comfyui, import_with_comfyui

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
    "karras_7": ("karras", 7, slice(None)),
    "karras_denoise": ("karras", 9, slice(-5, None)),
    "simple_2": ("simple", 2, slice(None)),
    "simple_3": ("simple", 3, slice(None)),
    "normal_5": ("normal", 5, slice(None)),
    "ddim_uniform_6": ("ddim_uniform", 6, slice(None)),
    "denoise_0.6": ("simple", 10, slice(-7, None)),
    "denoise_one_step": ("beta", 10, slice(-2, None)),
    "leftover_noise": ("simple", 10, slice(0, 6)),
    "leftover_one_step": ("beta", 10, slice(3, 5)),
    "middle": ("simple", 20, slice(7, 15)),
}

BY_COMFYUI = [
    "res_multistep", "er_sde", "gradient_estimation_cfg_pp", "dpm_adaptive", "dpmpp_sde", "euler_ancestral", "heun",
    "lcm", "ddpm", "uni_pc", "uni_pc_bh2",
]  # fmt: skip


@pytest.fixture(scope="module")
def comfy():
    """ComfyUI's modules, imported from a checkout without starting a server."""
    samplers, base = import_with_comfyui("comfy.samplers", "comfy.model_base")
    return SimpleNamespace(samplers=samplers, model_base=base)


SETTINGS = {
    "FLUX": {},
    "FLOW": {"shift": 3.0, "multiplier": 1000},
    "EPS": {},
    "V_PREDICTION": {"beta_schedule": "linear", "linear_start": 0.00085, "linear_end": 0.018},
}
"""Of FLUX.1 (timestep = sigma), SD3 (sigma times 1000), SDXL and PixArt, HunyuanDiT (both: index in a table)."""
NAMES = {"FLUX": "flow", "FLOW": "flow", "EPS": "eps", "V_PREDICTION": "v_prediction"}


def model_sampling(comfy, model_type: str, noise_scale: float | None = None, **settings):
    """ComfyUI's model sampling of a family."""
    config = SimpleNamespace(sampling_settings=SETTINGS[model_type] | settings)
    sampling = comfy.model_base.model_sampling(config, comfy.model_base.ModelType[model_type])
    if noise_scale is not None:
        sampling.noise_scale = noise_scale
    return sampling


def predict(x: torch.Tensor, timestep: torch.Tensor) -> list[torch.Tensor]:
    """Two branches of a smooth, nonlinear, position-dependent output that leans on the timestep."""
    t = torch.sin(timestep).view(-1, *[1] * (x.ndim - 1))
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
        options = {**model_options, "sampler_calc_cond_batch_function": self.evaluate}
        return self.comfy.samplers.sampling_function(self, x, sigma, [{}], [{}], self.cfg, model_options=options)


def latents(device: str) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Start noise, input latent and a soft mask."""
    stream = torch.Generator().manual_seed(SEED)
    noise, latent = (torch.randn(SHAPE, generator=stream).to(device) for _ in range(2))
    return noise, latent, torch.rand(SHAPE, generator=stream).round(decimals=1).to(device)


def our_run(name, sampling, sigmas, cfg, prediction, mask, noise, latent, on_step) -> torch.Tensor:
    """What nodes/pool_loop.py and the ranks make of a run together: start and end are scaled by ComfyUI, as there."""
    sampler, kind = SAMPLERS[name], PREDICTIONS[prediction]
    inpaint = None
    if mask is not None:
        inpaint = Inpaint(mask, latent, noise * getattr(sampling, "noise_scale", 1.0))
    highest = sampling.sigma_max.to(sigmas)
    start = sampling.noise_scaling(sigmas[0], noise, latent, bool(sigmas[0] > highest * (1 - 1e-5)))
    timesteps = torch.where(sigmas > 0, sampling.timestep(sigmas).float(), 0.0)
    result = run_steps(sampler, Denoiser(predict, kind, timesteps, cfg, inpaint), start, sigmas, on_step)
    return sampling.inverse_noise_scaling(sigmas[-1], result)


def both(comfy, name, sigmas, *, device="cpu", model_type="FLUX", sampling=None, cfg=1.0, masked=False):
    """Run ComfyUI and us on the same inputs; return both results and both lists of (index, x, denoised)."""
    noise, latent, mask = latents(device)
    sampling = (sampling or model_sampling(comfy, model_type)).to(device)
    sigmas = sigmas.to(device)
    their_steps: list[tuple[int, torch.Tensor, torch.Tensor]] = []
    theirs = comfy.samplers.sampler_object(name).sample(
        HostGuider(comfy, sampling, cfg),
        sigmas.clone(),
        {"seed": SEED, "model_options": {}},
        lambda index, denoised, x, total: their_steps.append((index, x.clone(), denoised.clone())),
        noise.clone(),
        latent,
        mask if masked else None,
        True,
    )
    our_steps: list[tuple[int, torch.Tensor, torch.Tensor]] = []
    ours = our_run(
        name,
        sampling,
        sigmas,
        cfg,
        NAMES[model_type],
        mask if masked else None,
        noise,
        latent,
        lambda evaluation, denoised: our_steps.append((evaluation.index, evaluation.x, denoised)),
    )
    return theirs, ours, their_steps, our_steps


def assert_close(ours: torch.Tensor, theirs: torch.Tensor) -> None:
    assert torch.isfinite(theirs).all()
    scale = max(1.0, theirs.abs().max().item())
    assert (ours - theirs).abs().max().item() < (1e-6 if ours.device.type == "cpu" else 1e-5) * scale


def assert_same(theirs, ours, their_steps, our_steps):
    """Within 1e-6 of scale at the end and at every callback. Mostly not a bit differs, but other torches may."""
    assert_close(ours, theirs)
    assert [step[0] for step in our_steps] == [step[0] for step in their_steps]
    for (_, our_x, our_denoised), (_, their_x, their_denoised) in zip(our_steps, their_steps, strict=True):
        assert_close(our_x, their_x)
        assert_close(our_denoised, their_denoised)


def schedule(comfy, name: str, model_type: str = "FLUX") -> torch.Tensor:
    scheduler, steps, part = SCHEDULES[name]
    return comfy.samplers.calculate_sigmas(model_sampling(comfy, model_type), scheduler, steps)[part]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("model_type", SETTINGS)
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
@pytest.mark.parametrize("model_type", ["FLUX", "EPS"])
@pytest.mark.parametrize("schedule_name", ["simple_8", "denoise_0.6", "leftover_noise"])
@pytest.mark.parametrize("name", SUPPORTED)
def test_inpainting_gives_what_comfyui_gives(comfy, name, schedule_name, model_type, device):
    sigmas = schedule(comfy, schedule_name, model_type)
    assert_same(*both(comfy, name, sigmas, model_type=model_type, cfg=2.5, masked=True, device=device))


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("name", SUPPORTED)
def test_a_noise_scale_gives_what_comfyui_gives(comfy, name, masked):
    sampling = model_sampling(comfy, "FLUX", noise_scale=1.7)
    assert_same(*both(comfy, name, schedule(comfy, "simple_8"), sampling=sampling, masked=masked))


@pytest.mark.parametrize("steps", [1, 2, 5])
@pytest.mark.parametrize("name", SUPPORTED)
def test_a_first_sigma_in_the_thousands_gives_what_comfyui_gives(comfy, name, steps):
    """Zero terminal signal, sigma 4518."""
    sampling = model_sampling(comfy, "V_PREDICTION", zsnr=True)
    sigmas = comfy.samplers.calculate_sigmas(sampling, "simple", steps)
    assert_same(*both(comfy, name, sigmas, model_type="V_PREDICTION", sampling=sampling))


def test_the_node_knows_which_outputs_the_pool_can_read(comfy):
    asked_loop = import_module("nodes.asked_loop")
    known = {"FLUX": "flow", "FLOW": "flow", "EPS": "eps", "V_PREDICTION": "v_prediction"}
    known |= {"V_PREDICTION_EDM": "v_prediction", "V_PREDICTION_CONTINUOUS": "v_prediction"}
    for name in (*known, "EDM", "IMG_TO_IMG", "FLOW_COSMOS", "V_PREDICTION_DDPM", "IMG_TO_IMG_FLOW"):
        sampling = comfy.model_base.model_sampling(
            SimpleNamespace(sampling_settings={}), comfy.model_base.ModelType[name]
        )
        assert asked_loop.prediction_name(sampling) == known.get(name, "")
        obstacles = asked_loop.sampling_obstacles(sampling)
        assert bool(obstacles) == (name not in known)
    scaled = model_sampling(comfy, "FLUX", noise_scale=1.7)
    assert asked_loop.sampling_obstacles(scaled) == ["a noise scale"]
    scaled = model_sampling(comfy, "EPS")
    scaled.sigma_data = 0.5
    assert asked_loop.sampling_obstacles(scaled) == ["a scale of the data"]


def test_all_of_comfyuis_samplers_are_known_by_their_objects_and_no_others(comfy):
    known = import_module("nodes.pool_obstacles").sampler_name
    names = list(comfy.samplers.SAMPLER_NAMES)
    assert [known(comfy.samplers.sampler_object(name)) for name in names] == names  # ddim is euler with other noise
    assert known(comfy.samplers.ksampler("dpmpp_2m_sde", {"eta": 0.3})) == "dpmpp_2m_sde"
    own = comfy.samplers.KSAMPLER(lambda model, x, sigmas, **options: x)
    changed = comfy.samplers.sampler_object("euler")
    changed.sample = print
    derived = type("Other", (comfy.samplers.KSAMPLER,), {})(comfy.samplers.sampler_object("euler").sampler_function)
    assert [known(each) for each in (own, changed, derived)] == [None, None, None]


def test_what_no_data_can_say_of_a_comfyui_loop_is_named(comfy):
    pool = import_module("nodes.pool_obstacles")
    sampling = model_sampling(comfy, "FLUX")

    def obstacles(name, sampling=sampling, **options):
        sampler = comfy.samplers.ksampler(name, options)
        guider = SimpleNamespace(inner_model=SimpleNamespace(model_sampling=sampling))
        asked = pool.AskedLoop(None, pool.sampler_name(sampler), sampler, guider, {}, None, None, None, None)
        return pool.host_obstacles(asked)

    assert obstacles("er_sde", max_stage=2) == []
    assert obstacles("er_sde", noise_scaler=print) == ["the sampler er_sde with options"]
    assert obstacles("heun", s_churn=0.5) == ["the sampler heun with options"]  # of the process's own random numbers
    ruled = type("Ruled", (type(sampling),), {"timestep": lambda self, sigma: sigma})()
    assert obstacles("er_sde", ruled) == ["the model sampling Ruled"]


def test_comfyuis_samplers_run_in_ranks_that_draw_its_noise(comfy, monkeypatch):
    """Else the loop goes step by step: ComfyUI on a GPU beside ranks on the CPU, or the other way round."""
    pool = import_module("nodes.pool_obstacles")
    monkeypatch.setattr(pool, "device_kind", lambda device: "old" if device.index == 2 else "new")
    cpu, gpu = torch.device("cpu"), torch.device("cuda", 0)

    def same(device: torch.device, devices: str, gpus: int = 3) -> bool:
        monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
        return pool.same_noise(device, ParallelConfig(devices=devices))

    assert same(cpu, "cpu:2")
    assert same(cpu, "auto", gpus=0)
    assert same(gpu, "auto")
    assert same(gpu, "1,2")
    assert not any((same(cpu, "auto"), same(cpu, "0,1"), same(gpu, "cpu:2"), same(gpu, "2,1")))
    assert not same(torch.device("mps"), "cpu:2")


@pytest.mark.parametrize("name", ["FLUX", "FLOW", "EPS", "V_PREDICTION", "EDM", "FLOW_COSMOS", "V_PREDICTION_DDPM"])
def test_a_model_sampling_travels_as_data_and_does_the_same(comfy, name):
    from parallel_runtime.denoising.host_denoise import make_sampling

    config = SimpleNamespace(sampling_settings=SETTINGS.get(name, {}))
    sampling = comfy.model_base.model_sampling(config, comfy.model_base.ModelType[name])
    made = make_sampling(*import_module("nodes.asked_loop").read_sampling(sampling))
    sigma = torch.tensor([0.7, 0.4])
    noise, latent, output = latents("cpu")
    for method, arguments in {
        "timestep": (sigma,), "percent_to_sigma": (0.2,), "calculate_input": (sigma, noise),
        "calculate_denoised": (sigma, output, noise), "noise_scaling": (sigma[:, None, None, None], noise, latent),
        "inverse_noise_scaling": (sigma[0], latent),
    }.items():  # fmt: skip
        ours, theirs = (getattr(each, method)(*arguments) for each in (made, sampling))
        assert torch.equal(torch.as_tensor(ours), torch.as_tensor(theirs)), method


def test_ranks_run_no_code_but_comfyuis_samplers(comfy):
    from parallel_runtime.denoising.host_denoise import load_guider, make_sampling, sampler_function
    from parallel_runtime.errors import RequestError
    from parallel_runtime.networks.comfyui.live_patches import make_guidance
    from parallel_runtime.networks.comfyui.node_rules import CFG
    from parallel_runtime.requests.comfyui_code import Guidance, Guider

    with pytest.raises(RequestError, match="no sampler sample_euler"):
        sampler_function("sample_euler")
    for name in ("torch", "reshape_sigma", "nothing"):
        with pytest.raises(RequestError, match=f"no model sampling {name}"):
            make_sampling([name], {}, {})
    others = Guider("comfy.samplers:KSAMPLER", {}), Guider("comfy_extras.nodes_custom_sampler:Guider_Basic", {})
    for guider, indices in [*((each, [0]) for each in others), (Guider(CFG, {}), [2]), (Guider(CFG, {}), [1, 0])]:
        with pytest.raises(RequestError, match="were sent the guider"):
            load_guider(guider, indices)
    skip = "comfy_extras.nodes_slg:SkipLayerGuidanceDiT.execute.<locals>"
    for place, code, inside in [
        ("sampler_cfg_function", "os:system", {}),
        ("denoise_mask", "comfy_extras.nodes_mahiro:Mahiro.execute.<locals>.mahiro_normd", {}),
        ("sampler_post_cfg_function", f"{skip}.post_cfg_function", {"skip": "os:system"}),
        ("sampler_post_cfg_function", f"{skip}.post_cfg_function", {}),
    ]:
        with pytest.raises(RequestError, match="no worker may run"):
            make_guidance([Guidance(place, code, inside)], None)


@pytest.mark.parametrize("cfg", [1.0, 3.0])
@pytest.mark.parametrize("name", BY_COMFYUI)
@pytest.mark.parametrize("masked", [False, True])
def test_comfyuis_own_sampler_over_our_denoiser_gives_its_latent(comfy, name, cfg, masked):
    from parallel_runtime.denoising.host_denoise import GuidedModel, load_guider, sampler_function
    from parallel_runtime.networks.comfyui.node_rules import CFG
    from parallel_runtime.requests.comfyui_code import Guider

    sampling, sigmas = model_sampling(comfy, "FLUX"), schedule(comfy, "simple_8")
    noise, latent, mask = latents("cpu")
    steps: list[tuple[int, torch.Tensor]] = []
    theirs: list[tuple[int, torch.Tensor]] = []
    wanted = comfy.samplers.sampler_object(name).sample(
        HostGuider(comfy, sampling, cfg), sigmas.clone(), {"seed": SEED, "model_options": {}},
        lambda index, denoised, x, total: theirs.append((index, denoised)), noise.clone(), latent,
        mask if masked else None,
    )  # fmt: skip
    start = sampling.noise_scaling(sigmas[0], noise, latent, True)
    # At CFG 1 the negative branch is left out, but for samplers that look at it.
    indices = [0, 1] if cfg != 1.0 or name.endswith("cfg_pp") else [0]
    guider = load_guider(Guider(CFG, {"cfg": cfg}), indices)
    evaluate = SimpleNamespace(
        some=lambda x, timestep, asked: [predict(x, timestep)[branch] for branch, _ in asked],
        agreed=lambda x: x,
        branches=[SimpleNamespace(arguments={"context": None})] * 2,
    )
    model = GuidedModel(guider, evaluate, sampling, Inpaint(mask, latent, noise) if masked else None, sigmas)
    ours = model.sample(
        sampler_function(name), SimpleNamespace(options={}, seed=SEED, all_branches=True), start, {},
        lambda index, denoised: steps.append((index, denoised)),
    )  # fmt: skip
    assert (ours - wanted).abs().max() <= 1e-6 * wanted.abs().max()
    assert [index for index, _ in steps] == [index for index, _ in theirs]
    assert (steps[-1][1] - theirs[-1][1]).abs().max() <= 1e-6 * theirs[-1][1].abs().max()
