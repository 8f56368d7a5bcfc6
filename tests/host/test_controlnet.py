"""Load ControlNet Model and Apply ControlNet with our MODEL: what they give with Load Diffusion Model's."""

from __future__ import annotations

import inspect
from dataclasses import replace
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from parallel_runtime.networks.diffusers.hunyuan_dit import HUNYUAN_DIT
from parallel_runtime.networks.diffusers.sd3 import SD3
from parallel_runtime.networks.diffusers.sdxl import SDXL
from tests.comfyui_networks.unet_controls import LORA, ORDINARY
from tests.tiny_model import write_original
from tests.tiny_sd3 import tiny_config as tiny_sd3
from tests.tiny_sdxl import recognised_config as tiny_sdxl

from .comfy_host import ComfyHost
from .small_files import run_beside
from .test_families import FAMILIES
from .workflow import MODEL, SAVE, Prompt, Workflow, link, node, put_control

pytestmark = pytest.mark.host

TOLERANCE = 1e-4
"""Of the latent's scale."""
UNET_FILE = "controlled-sdxl.safetensors"
ONE, UNION, OF_SD3, SD3_FILE = "one.safetensors", "union.safetensors", "sd3.safetensors", "controlled-sd3.safetensors"
_FLUX = {
    "patch_size": 1, "in_channels": 64, "num_layers": 1, "num_single_layers": 1, "attention_head_dim": 128,
    "num_attention_heads": 4, "joint_attention_dim": 64, "pooled_projection_dim": 32, "guidance_embeds": True,
    "axes_dims_rope": [16, 56, 56],
}  # fmt: skip


def _save(network: torch.nn.Module, path: Any) -> None:
    """Random weights, of which those at the end are not zero as in a new ControlNet."""
    path.parent.mkdir(exist_ok=True)
    generator = torch.Generator().manual_seed(3)
    tensors = {
        name: torch.randn(tensor.shape, generator=generator) * (0.3 / max(1, tensor.shape[-1]) ** 0.5)
        for name, tensor in network.state_dict().items()
    }
    save_file(tensors, path)


@pytest.fixture(scope="module")
def nets(host):
    """The session's ComfyUI, with tiny ControlNets."""
    from diffusers import FluxControlNetModel, SD3ControlNetModel

    folder = host.base / "models" / "controlnet"
    _save(FluxControlNetModel(**_FLUX), folder / ONE)
    _save(FluxControlNetModel(**_FLUX, num_mode=3), folder / UNION)
    config = tiny_sd3()
    write_original(SD3, host.base / "models" / "diffusion_models" / SD3_FILE, config)
    known = inspect.signature(SD3ControlNetModel.__init__).parameters
    taken = {name: value for name, value in config.items() if name in known and name != "dual_attention_layers"}
    _save(SD3ControlNetModel(**{**taken, "num_layers": 1}), folder / OF_SD3)
    return host


Control = tuple[str, dict[str, Any]]
_WHOLE = {"strength": 0.8, "start_percent": 0.0, "end_percent": 1.0}
CASES: dict[str, tuple[Workflow, list[Control]]] = {
    "from start to end": (Workflow(), [(ONE, _WHOLE)]),
    "CFG, unequal prompts": (Workflow(cfg=3.0, lengths=(9, 5)), [(ONE, _WHOLE)]),
    "CFG, a batch, odd sizes": (Workflow(cfg=3.0, latent=(0, 2, 13, 19)), [(ONE, _WHOLE)]),
    "a part of the steps": (Workflow(cfg=3.0), [(ONE, {**_WHOLE, "start_percent": 0.2, "end_percent": 0.7})]),
    "two, one after the other": (Workflow(cfg=3.0), [(ONE, _WHOLE), (UNION, {**_WHOLE, "end_percent": 0.5})]),
    "a union": (Workflow(cfg=3.0), [(UNION, _WHOLE)]),
    "noise mask": (Workflow(cfg=3.0, latent=(9, 1, 14, 20), mask=True), [(ONE, _WHOLE)]),
    "SD3": (Workflow(model=SD3_FILE, cfg=3.0), [(OF_SD3, _WHOLE)]),
}  # fmt: skip


def controlled(workflow: Workflow, controls: list[Control]) -> Prompt:
    """The workflow's graph with ControlNets on its prompts."""
    graph = workflow.prompt()
    if workflow.model == SD3_FILE:
        for name in ("positive", "negative"):
            graph[name]["inputs"] |= {"width": tiny_sd3()["joint_attention_dim"],
                                      "pooled": tiny_sd3()["pooled_projection_dim"]}  # fmt: skip
    if workflow.model == UNET_FILE:
        _, batch, height, width = workflow.latent
        graph["latent"] = node("EmptyLatentImage", width=8 * width, height=8 * height, batch_size=batch)
        for name in ("positive", "negative"):
            graph[name]["inputs"] |= {"width": 2048, "pooled": 1280}
    graph["vae"] = node("TestVae", channels=16, video=False)
    graph["picture"] = node("TestRandomImage", seed=5, height=96, width=128)
    for number, (name, settings) in enumerate(controls):
        graph[f"net {number}"] = node("ControlNetLoader", control_net_name=name)
        net = link(f"net {number}")
        if name == UNION:
            graph[f"kind {number}"] = node("SetUnionControlNetType", control_net=net, type="depth")
            net = link(f"kind {number}")
        for slot, prompt in enumerate(("positive", "negative")):
            graph[f"{prompt} before {number}"] = graph[prompt]
            if slot == 0:
                graph[f"apply {number}"] = node(
                    "ControlNetApplyAdvanced", positive=link(f"positive before {number}"),
                    negative=link(f"negative before {number}"), control_net=net, image=link("picture"),
                    vae=link("vae"), **settings,
                )  # fmt: skip
        for slot, prompt in enumerate(("positive", "negative")):
            graph[prompt] = node("ConditioningSetTimestepRange", conditioning=link(f"apply {number}", slot),
                                 start=0.0, end=1.0)  # fmt: skip
    return graph


def as_sd3(nets: ComfyHost, workflow: Workflow, controls: list[Control]) -> tuple[Workflow, list[Control]]:
    """The same for SD3, which has no ControlNet of several kinds."""
    if all(name == UNION for name, _ in controls):
        nets.needs_small_flux()
    return replace(workflow, model=SD3_FILE), [(OF_SD3, settings) for _, settings in controls]


@pytest.mark.slow
def test_stages_take_residuals_step_by_step(nets):
    """What a ControlNet adds behind a block is added on the stage that has the block, or takes over behind it."""
    workflow, controls = CASES["CFG, unequal prompts"]
    staged = replace(workflow.on("cpu:2"), stages=(2, 2, 1))
    wanted = nets.latent(nets.run(controlled(workflow, controls)), SAVE)
    ours = nets.latent(nets.run(controlled(staged, controls)), SAVE)
    assert wanted.std() > 0.1
    assert (ours - wanted).abs().max() < TOLERANCE * wanted.abs().max()


@pytest.mark.long_but_for("CFG, unequal prompts", "CFG, a batch, odd sizes", "two, one after the other", "SD3")
@pytest.mark.slow_but_for("a part of the steps")
@pytest.mark.parametrize("name", CASES)
def test_a_controlnet_does_to_ours_what_it_does_to_comfyuis_own(nets, name):
    workflow, controls = CASES[name]
    if workflow.model == MODEL and not nets.small_flux:
        workflow, controls = as_sd3(nets, workflow, controls)
    plain = nets.latent(nets.run(controlled(workflow, [])), SAVE)
    wanted = nets.latent(nets.run(controlled(workflow, controls)), SAVE)
    scale = wanted.abs().max()
    assert (wanted - plain).abs().max() > 100 * TOLERANCE * scale
    devices = {"a part of the steps": ("cpu:2",), "CFG, unequal prompts": ("cpu:3", "cpu:2", "cpu:1")}
    for each in devices.get(name, ("cpu:3",)):  # the most ranks first, of whose pool fewer are a part
        run = nets.run(controlled(workflow.on(each), controls))
        assert run.error is None, run.error["exception_message"]
        assert (nets.latent(run, SAVE) - wanted).abs().max() < TOLERANCE * scale, each


@pytest.fixture(scope="module")
def unet(host):
    """The session's ComfyUI with a tiny SDXL and its ControlNets."""
    folder = host.base / "models" / "controlnet"
    folder.mkdir(exist_ok=True)
    file = write_original(SDXL, host.base / "models" / "diffusion_models" / UNET_FILE, tiny_sdxl())
    run_beside(host, "unet_controls", host.host.path, file, folder)
    yield host
    for made in (file, folder / ORDINARY, folder / LORA):
        made.unlink()


@pytest.mark.long_but_for("unet.safetensors")
@pytest.mark.slow
@pytest.mark.parametrize("net", [ORDINARY, LORA])
def test_a_controlnet_of_a_unet_and_one_of_the_models_own_weights(unet, net):
    workflow = Workflow(model=UNET_FILE, cfg=3.0, steps=2, lengths=(154, 77), latent=(0, 1, 10, 12))
    plain, wanted = (unet.latent(unet.run(controlled(workflow, each)), SAVE) for each in ([], [(net, _WHOLE)]))
    scale = wanted.abs().max()
    assert (wanted - plain).abs().max() > 100 * TOLERANCE * scale
    for devices in ("cpu:2", "cpu:1"):
        run = unet.run(controlled(workflow.on(devices), [(net, _WHOLE)]))
        assert run.error is None, run.error["exception_message"]
        assert (unet.latent(run, SAVE) - wanted).abs().max() < TOLERANCE * scale, devices


_TIMES = {"q": 1.3, "k": 0.8, "v": 1.2, "out": 0.9}
OF_A_UNET: dict[str, dict[str, Any]] = {
    "UNetSelfAttentionMultiply": _TIMES,
    "UNetCrossAttentionMultiply": _TIMES,
    "PatchModelAddDownscale": {
        "block_number": 3, "downscale_factor": 2.0, "start_percent": 0.0, "end_percent": 0.6,
        "downscale_after_skip": True, "downscale_method": "bicubic", "upscale_method": "bicubic",
    },
}  # fmt: skip
"""FreeU acts at widths that a tiny one has not: its functions are compared in tests/comfyui_networks/patches.py."""


@pytest.mark.slow
def test_nodes_for_u_nets_act_one_after_the_other_on_one_of_several_levels(unet):
    """Those of other networks are in test_model_nodes.py."""
    workflow = Workflow(model=UNET_FILE, cfg=3.0, steps=2, latent=(0, 1, 16, 24))

    def latent(each: Workflow, kinds: list[str]) -> torch.Tensor:
        graph = controlled(each, [])
        for number, kind in enumerate(kinds):
            graph[f"before {number}"] = graph.pop("model")
            graph["model"] = node(kind, model=link(f"before {number}"), **OF_A_UNET[kind])
        return unet.latent(unet.run(graph), SAVE)

    last = latent(workflow, [])
    for number in range(1, len(OF_A_UNET) + 1):
        kinds = list(OF_A_UNET)[:number]
        wanted = latent(workflow, kinds)
        scale = wanted.abs().max()
        assert (wanted - last).abs().max() > 100 * TOLERANCE * scale, kinds[-1]
        last = wanted
    assert (latent(workflow.on("cpu:2"), list(OF_A_UNET)) - last).abs().max() < TOLERANCE * scale


@pytest.mark.slow
def test_parallel_sampler_runs_a_controlnet_per_step(nets):
    workflow, controls = CASES["CFG, unequal prompts"]
    if not nets.small_flux:
        workflow, controls = as_sd3(nets, workflow, controls)
    wanted = nets.latent(nets.run(controlled(workflow, controls)), SAVE)
    run = nets.run(controlled(replace(workflow.on("cpu:2"), sampler_node="ParallelSampler"), controls))
    assert run.error is None, run.error["exception_message"]
    assert (nets.latent(run, SAVE) - wanted).abs().max() < TOLERANCE * wanted.abs().max()


@pytest.mark.slow
def test_a_controlnet_of_hunyuan_dit(host):
    """Qwen-Image's is in comfyui_families.py."""
    family, name = FAMILIES["hunyuan-dit"], "controlled-hunyuan.safetensors"
    path = write_original(HUNYUAN_DIT, host.base / "models" / "diffusion_models" / name, family.config)
    workflow = replace(family.workflow, model=name, steps=2, latent=(0, 1, 9, 14))

    def latent(devices: str, controlled: bool) -> torch.Tensor:
        graph = family.graph(workflow.on(devices))
        if controlled:
            net = node("TestControlNet", kind="hunyuan-dit", width=family.config["hidden_size"])
            put_control(graph, net, _WHOLE, node("TestVae", channels=4, video=False))
        run = host.run(graph)
        assert run.error is None, run.error["exception_message"]
        return host.latent(run, SAVE)

    plain, wanted = (latent("native", controlled) for controlled in (False, True))
    scale = wanted.abs().max()
    assert (wanted - plain).abs().max() > 100 * TOLERANCE * scale
    assert (latent("cpu:2", True) - wanted).abs().max() < TOLERANCE * scale
    path.unlink()
