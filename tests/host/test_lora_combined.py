"""LoRAs beside what else hangs on MODEL, in one graph of a real ComfyUI: text encoders, saving, merging, ControlNets,
and all unusual adapters on quantised weights."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.tiny_lora import FLUX, KINDS, write_lora

from .older_host import name_version
from .test_controlnet import ONE, nets  # noqa: F401 - a fixture
from .test_lora import (  # noqa: F401 - `host` is a fixture
    BASE,
    TOLERANCE,
    Lora,
    assert_same,
    host,
    latent,
    run_anew,
    with_hooks,
    with_loras,
)
from .test_real_weights import merged
from .workflow import SAVE, Prompt, Workflow, link, node, put_control

pytestmark = pytest.mark.host

BYPASS = "LoraLoaderBypassModelOnly"
BOTH = "both.safetensors"
TEXT_LAYERS = {"0_self_attn_q_proj": (64, 64), "1_mlp_fc1": (128, 64)}
UNUSUAL = tuple(Lora(kind, (0.4, -0.3)[number % 2]) for number, kind in enumerate(reversed(KINDS)))
"""Every kind of adapter that ComfyUI has, one after the other: `set`, which takes the place of the weight, is first."""


def changes(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether the difference is one that a tolerance does not hide."""
    return bool((one - other).abs().max() > 10 * TOLERANCE * other.abs().max())


@pytest.fixture(autouse=True)
def of_flux(host) -> None:  # noqa: F811
    """ComfyUI 0.8.0, which opens no small FLUX, is tried in test_lora.py."""
    host.needs_small_flux()


@pytest.fixture
def of_both(host) -> Iterator[None]:  # noqa: F811
    """A LoRA file with keys of the network and of CLIP."""
    path = write_lora(host.base / "models" / "loras" / BOTH, FLUX, seed=7)
    tensors = load_file(path)
    write_lora(path, TEXT_LAYERS, spell="lora_te_text_model_encoder_layers_{}".format, seed=8)
    save_file(tensors | load_file(path), path)
    yield
    path.unlink()


def with_clip(prompt: Prompt, strengths: tuple[float, float]) -> Prompt:
    """The graph with prompts of a CLIP, and LoraLoader behind it and the MODEL, with a strength for each of the two."""
    given = dict(zip(("strength_model", "strength_clip"), strengths, strict=True))
    prompt = {**prompt, "plain clip": node("TestTinyClip"), "plain model": prompt["model"]}
    prompt["model"] = node("LoraLoader", model=link("plain model"), clip=link("plain clip"), lora_name=BOTH, **given)
    for name in ("positive", "negative"):
        prompt[f"{name} text"] = node("CLIPTextEncode", clip=link("model", 1), text=f"a {name} prompt")
        pooled = json.dumps({"pooled_output": [1, 32], "guidance": 3.0})  # of the width that the tiny FLUX takes
        prompt[name] = node("TestConditioningValues", conditioning=link(f"{name} text"), values=pooled)
    return prompt


@pytest.mark.slow
def test_a_file_with_keys_of_clip_changes_the_network_in_the_pool_and_comfyuis_own_clip(host, of_both):  # noqa: F811
    workflow = replace(BASE, cfg=3.0)

    def given(each: Workflow, strengths: tuple[float, float]) -> torch.Tensor:
        return host.latent(host.run(with_clip(each.prompt(), strengths)), SAVE)

    wanted = {strengths: given(workflow, strengths) for strengths in ((0.8, 0.9), (0.8, 0.0), (0.0, 0.9))}
    assert changes(wanted[0.8, 0.9], wanted[0.8, 0.0])
    assert changes(wanted[0.8, 0.9], wanted[0.0, 0.9])
    for strengths in ((0.8, 0.9), (0.0, 0.9)):
        assert_same(given(workflow.on("cpu:2"), strengths), wanted[strengths])


@pytest.mark.slow
def test_a_lora_on_ours_is_in_what_is_saved_and_in_what_is_merged(host):  # noqa: F811
    def graph(second: Workflow, name: str) -> Prompt:
        """One MODEL with a LoRA: saved, and merged into another of ComfyUI's, which has one as well."""
        made = merged(BASE, replace(second, model="plan.safetensors"))
        loras = (("model", Lora("peft", 0.5)), ("second model", Lora("lokr", 0.7)))
        for place, lora in loras:
            made[f"plain {place}"] = made[place]
            made[place] = lora.after(link(f"plain {place}"))
        made["saved"] = node("ModelSave", model=link("second model"), filename_prefix=f"with-lora/{name}")
        return made

    runs = {name: host.run(graph(second, name)) for name, second in (("ours", BASE.on("cpu:2")), ("native", BASE))}
    ours, wanted = (host.latent(run, SAVE) for run in runs.values())
    assert_same(ours, wanted)
    assert changes(wanted, host.latent(host.run(merged(BASE, replace(BASE, model="plan.safetensors"))), SAVE))
    folder = host.base / "output" / "with-lora"
    saved, native = (load_file(next(folder.glob(f"{name}*.safetensors"))) for name in runs)
    assert saved.keys() == native.keys()
    assert all(torch.equal(saved[key], native[key]) for key in native)
    plain = load_file(host.base / "models" / "diffusion_models" / "plan.safetensors")
    key = "double_blocks.0.img_attn.qkv.weight"
    assert not torch.equal(native[f"model.diffusion_model.{key}"], plain[key])


@pytest.mark.slow
def test_a_bypass_lora_beside_plain_ones_on_three_ranks(host):  # noqa: F811
    loras = Lora("lora", 0.7, BYPASS), Lora("diffusers names", -0.6), Lora("loha", 0.5), Lora("lokr", 0.4, BYPASS)
    parallel = BASE.on("cpu:3")
    wanted = latent(host, BASE, *loras)
    assert changes(wanted, latent(host, BASE, *loras[1:3]))
    plain = run_anew(host, parallel)
    assert_same(run_anew(host, parallel, *loras), wanted)
    assert torch.equal(run_anew(host, parallel), plain)


@pytest.mark.slow
def test_loras_hooks_a_controlnet_and_cfg_in_one_graph_on_three_ranks(nets):  # noqa: F811
    loras = Lora("peft", 0.3), Lora("lora", 0.6, BYPASS)
    settings = {"strength": 0.8, "start_percent": 0.0, "end_percent": 0.8}

    def graph(each: Workflow, control: bool = True) -> Prompt:
        prompt = with_hooks(each.prompt())
        if control:
            net = node("ControlNetLoader", control_net_name=ONE)
            put_control(prompt, net, settings, node("TestVae", channels=16, video=False))
        return with_loras(prompt, *loras)

    workflow = replace(BASE, cfg=3.0, steps=3, lengths=(9, 5))
    wanted = nets.latent(nets.run(graph(workflow)), SAVE)
    assert changes(wanted, nets.latent(nets.run(graph(workflow, control=False)), SAVE))
    assert_same(nets.latent(nets.run(graph(workflow.on("cpu:3"))), SAVE), wanted)


@pytest.mark.long_but_for("scaled_fp8-cpu:2")
@pytest.mark.slow
@pytest.mark.parametrize(("name", "devices"), [("scaled_fp8", "cpu:2"), ("int8_tensorwise", "cpu:1")])
def test_every_kind_of_adapter_at_once_on_quantised_weights_and_none_leaves_a_trace(host, has_format, name, devices):  # noqa: F811
    if not has_format(name):
        pytest.skip(f"{name_version(host.host.path)} has no {name}")
    # One rank for int8: its products take one scale for all rows of a call.
    workflow = replace(BASE, model=f"{name}.safetensors")
    parallel = workflow.on(devices)
    sets: list[tuple[Lora, ...]] = [(), UNUSUAL, (Lora("lokr", 0.7),), ()]
    ours = [run_anew(host, parallel, *loras) for loras in sets]
    for loras, given in zip(sets[1:3], ours[1:3], strict=True):
        assert_same(given, latent(host, workflow, *loras))
        assert changes(given, ours[0])
    assert torch.equal(ours[-1], ours[0])
