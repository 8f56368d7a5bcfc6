"""LoRA in a real ComfyUI: its own nodes after Parallel Loader give what they give after Load Diffusion Model."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.comfyui_networks.formats import FORMATS
from tests.tiny_lora import FLUX, FLUX_DIFFUSERS, KINDS, SD3, SD3_DIFFUSERS, Layers, kohya, peft, write_lora

from .older_host import name_version
from .test_graph_stays_a_graph import pool_pids
from .workflow import SAMPLER, SAVE, Prompt, Workflow, link, node

pytestmark = pytest.mark.host

TOLERANCE = 1e-4
"""Of the latent's scale."""

WIDTH = 512
LAYERS: dict[str, tuple[Layers, Layers]] = {
    "published": (FLUX, SD3),
    "of diffusers": (FLUX_DIFFUSERS, SD3_DIFFUSERS),
    "of no model": ({"elsewhere.linear": (8, 8)}, {"elsewhere.linear": (8, 8)}),
}
"""Whose layers' names -> those of the FLUX, and of the SD3 that stands for it where ComfyUI opens no small FLUX."""
FILES: dict[str, tuple[str, dict[str, Any]]] = {
    **{kind: ("published", {"kind": kind}) for kind in KINDS},
    "peft": ("published", {"kind": "peft", "spell": peft, "seed": 1}),
    "diffusers names": ("of diffusers", {"kind": "peft", "spell": lambda layer: f"transformer.{layer}", "seed": 2}),
    "bf16": ("published", {"seed": 3, "dtype": torch.bfloat16}),
    "nothing": ("of no model", {"spell": kohya}),
}


@dataclass(frozen=True)
class Lora:
    """A LoRA node."""

    file: str
    strength: float = 0.8
    node: str = "LoraLoaderModelOnly"

    def after(self, model: list[Any]) -> dict[str, Any]:
        return node(self.node, model=model, lora_name=f"{self.file}.safetensors", strength_model=self.strength)


@pytest.fixture(scope="module")
def host(host):
    """ComfyUI with LoRA files for the model of the tests."""
    wider = {"lora_up.weight": torch.randn(WIDTH, 4), "lora_down.weight": torch.randn(4, 128) * 0.1}
    widened = {f"diffusion_model.img_in.{name}": factor for name, factor in wider.items()}
    widened["diffusion_model.img_in.reshape_weight"] = torch.tensor([WIDTH, 128])
    folder = host.base / "models" / "loras"
    folder.mkdir(exist_ok=True)
    save_file(widened, folder / "wider.safetensors")
    for name, (named, options) in FILES.items():
        layers = LAYERS[named][0 if host.small_flux else 1]
        write_lora(folder / f"{name}.safetensors", layers, **options)
    return host


def with_loras(prompt: Prompt, *loras: Lora) -> Prompt:
    """The graph with these after its loader."""
    if not loras:
        return prompt
    prompt = dict(prompt)
    prompt["before lora"] = prompt.pop("model")
    last = "before lora"
    for number, lora in enumerate(loras):
        name = "model" if number == len(loras) - 1 else f"lora {number}"
        prompt[name] = lora.after(link(last))
        last = name
    return prompt


def latent(host, workflow: Workflow, *loras: Lora) -> torch.Tensor:
    return host.latent(host.run(with_loras(workflow.prompt(), *loras)), SAVE)


def assert_same(ours: torch.Tensor, wanted: torch.Tensor) -> None:
    assert wanted.std() > 0.1
    assert (ours - wanted).abs().max() < TOLERANCE * wanted.abs().max()


BASE = Workflow(steps=2)


@pytest.mark.long_but_for("lokr", "dora")
@pytest.mark.slow_but_for("lokr")
@pytest.mark.parametrize("file", FILES)
def test_every_kind_gives_what_load_diffusion_model_gives(host, file):
    wanted = latent(host, BASE, Lora(file))
    ours = latent(host, BASE.on("cpu:2"), Lora(file))
    assert_same(ours, wanted)
    changed = (wanted - latent(host, BASE)).abs().max() > 10 * TOLERANCE * wanted.abs().max()
    assert changed == (file != "nothing")


def run_anew(host, workflow: Workflow, *loras: Lora) -> torch.Tensor:
    """The latent of a sampler that has run, and was not taken from ComfyUI's cache."""
    run = host.run(with_loras(workflow.prompt(), *loras))
    assert SAMPLER in run.executed, run.error
    return host.latent(run, SAVE)


@pytest.mark.slow
def test_strengths_change_files_stack_and_what_is_removed_leaves_nothing(host):
    parallel = BASE.on("cpu:2")
    strong, negative, other = Lora("lora", 1.2), Lora("lora", -0.6), Lora("diffusers names", 0.9)
    sets = [(), (strong,), (negative,), (strong, other), (other,), (strong,), (Lora("set"), other), ()]
    ours = [run_anew(host, parallel, *loras) for loras in sets]
    assert torch.equal(ours[-1], ours[0])  # bit for bit
    assert torch.equal(ours[5], ours[1])
    for loras, given in zip(sets[1:5], ours[1:5], strict=True):
        assert_same(given, latent(host, BASE, *loras))


@pytest.mark.slow
def test_two_prompts_with_unlike_sets_of_one_model_take_turns(host):
    first, second = BASE.on("cpu:2"), BASE.on("cpu:2", "ParallelSampler")
    one, other = (Lora("peft"),), (Lora("peft", -0.4), Lora("bf16"))
    ours = [run_anew(host, *each) for each in ((first, *one), (second, *other), (first, *one), (second, *other))]
    assert torch.equal(ours[2], ours[0])
    assert torch.equal(ours[3], ours[1])
    assert_same(ours[0], latent(host, BASE, *one))
    assert_same(ours[1], latent(host, BASE, *other))


PLANS = {
    "three ranks": BASE.on("cpu:3"),
    "one rank": BASE.on("cpu:1"),
    "cfg": replace(BASE, cfg=4.0, lengths=(9, 5)).on("cpu:2"),
    "stages": replace(BASE, stages=(2, 1, 1)).on("cpu:2"),
    "stages in the pool": replace(BASE, stages=(2, 2, 1), steps=1).on("cpu:2", "ParallelSampler"),
    "in the pool": BASE.on("cpu:3", "ParallelSampler"),
}


@pytest.mark.long_but_for("stages")
@pytest.mark.slow
@pytest.mark.parametrize("name", PLANS)
def test_every_plan_has_the_patched_weights(host, name):
    parallel = PLANS[name]
    loras = Lora("lokr"), Lora("diffusers names", -0.7)
    wanted = latent(host, replace(parallel.on("native", "KSampler"), stages=None), *loras)
    assert_same(latent(host, parallel, *loras), wanted)


BYPASSED = ("lora", "loha", "lokr", "boft", "diff")


@pytest.mark.long_but_for("diff")
@pytest.mark.slow
@pytest.mark.parametrize("file", BYPASSED)
def test_a_bypass_lora_acts_beside_its_layers(host, file):
    lora = Lora(file, 0.7, "LoraLoaderBypassModelOnly")
    parallel = BASE.on("cpu:2")
    assert_same(latent(host, parallel, lora), latent(host, BASE, lora))
    assert_same(run_anew(host, parallel), latent(host, BASE))


@pytest.mark.slow
def test_a_bypass_that_fails_in_comfyui_is_refused_by_name_and_the_pool_lives(host):
    parallel = BASE.on("cpu:2")
    for file in ("oft", "glora"):
        run = host.run(with_loras(parallel.prompt(), Lora(file, 0.7, "LoraLoaderBypassModelOnly")))
        assert run.error is not None
        assert "bypass of" in run.error["exception_message"]
    processes = pool_pids(host)
    assert_same(run_anew(host, parallel), latent(host, BASE))
    assert pool_pids(host) == processes


@pytest.mark.long_but_for("int8_tensorwise", "nvfp4")
@pytest.mark.slow
@pytest.mark.parametrize("name", FORMATS)
def test_quantised_weights_are_patched_as_comfyui_does(host, has_format, name):
    if not has_format(name):
        pytest.skip(f"{name_version(host.host.path)} has no {name}")
    # One rank: products of int8 take one scale for all rows of a call.
    workflow = replace(BASE, model=f"{name}.safetensors")
    wanted, plain = latent(host, workflow, Lora("peft", 0.5)), latent(host, workflow)
    ours = [run_anew(host, workflow.on("cpu:1"), *loras) for loras in ((), (Lora("peft", 0.5),), ())]
    assert_same(ours[1], wanted)
    assert_same(ours[0], plain)
    assert torch.equal(ours[2], ours[0])


def hooked(text: str, hooks: str) -> dict[str, Any]:
    """A prompt with hooks."""
    given = {"cond_NEW": link(text), "strength": 1.0, "set_cond_area": "default", "hooks": link(hooks)}
    return node("ConditioningSetProperties", **given)


def with_hooks(prompt: Prompt) -> Prompt:
    """Each prompt with a LoRA of its own, one of them on a schedule."""
    hook = {"strength_model": 0.9, "lora_name": "lora.safetensors"}
    prompt = {**prompt, "always": node("CreateHookLoraModelOnly", **hook)}
    prompt["first"] = node("CreateHookKeyframe", strength_mult=1.5, start_percent=0.0)
    prompt["then"] = node("CreateHookKeyframe", strength_mult=0.2, start_percent=0.6, prev_hook_kf=link("first"))
    prompt["other"] = node("CreateHookLoraModelOnly", strength_model=-0.7, lora_name="lokr.safetensors")
    prompt["scheduled"] = node("SetHookKeyframes", hooks=link("other"), hook_kf=link("then"))
    for name, hooks in (("positive", "scheduled"), ("negative", "always")):
        prompt[f"{name} text"] = prompt[name]
        prompt[name] = hooked(f"{name} text", hooks)
    return prompt


@pytest.mark.long  # CI has them beside a ControlNet, in test_lora_combined.py
def test_hooks_give_each_prompt_its_weights_on_their_schedule(host):
    workflow = replace(BASE, cfg=3.0, steps=4)
    lora = Lora("peft", 0.3)
    prompts = [with_loras(with_hooks(each.prompt()), lora)
               for each in (workflow.on("cpu:2"), workflow)]  # fmt: skip
    ours, wanted = (host.latent(host.run(prompt), SAVE) for prompt in prompts)
    assert_same(ours, wanted)
    without = latent(host, workflow, lora)
    assert (wanted - without).abs().max() > 10 * TOLERANCE * wanted.abs().max()


@pytest.mark.slow
def test_a_lora_that_widens_the_first_layer_takes_the_concatenated_channels(host):
    host.needs_small_flux()

    def graph(workflow: Workflow) -> Prompt:
        prompt = with_loras(workflow.prompt(), Lora("wider", 0.9))
        prompt["text"] = prompt["positive"]
        values = json.dumps({"concat_latent_image": [1, 16, 14, 20]})
        prompt["positive"] = node("TestConditioningValues", conditioning=link("text"), values=values)
        return prompt

    parallel = BASE.on("cpu:2")
    plain = run_anew(host, parallel)
    ours, wanted = (host.latent(host.run(graph(each)), SAVE) for each in (parallel, BASE))
    assert_same(ours, wanted)
    assert_same(run_anew(host, parallel), plain)


def test_what_a_lora_has_for_text_encoders_is_left_out(host):
    graph = replace(BASE, patch="of a text encoder").on("cpu:2").prompt()
    assert_same(host.latent(host.run(graph), SAVE), latent(host, BASE))


def test_an_adapter_that_no_rank_has_is_refused_at_its_node(host):
    graph = Workflow(loader="cpu:2", patch="adapter of its own").prompt()
    run = host.run(graph)
    assert run.error is not None
    assert run.error["node_type"] == "TestModelPatch"
    assert "OwnAdapter" in run.error["exception_message"]


@pytest.mark.slow
def test_another_model_as_a_lora_of_one_prompt(host):
    folder = host.base / "models"
    tensors = load_file(folder / "diffusion_models" / "plan.safetensors")
    whole = {f"model.diffusion_model.{name}": tensor for name, tensor in tensors.items()}
    (folder / "checkpoints").mkdir(exist_ok=True)
    save_file(
        {**whole, "text_encoders.clip_l.logit_scale": torch.zeros(())}, folder / "checkpoints" / "as lora.safetensors"
    )

    def graph(workflow: Workflow) -> Prompt:
        prompt = with_loras(workflow.prompt(), Lora("peft", 0.3))
        prompt["hook"] = node("CreateHookModelAsLoraModelOnly", ckpt_name="as lora.safetensors", strength_model=0.4)
        prompt["text"] = prompt["positive"]
        prompt["positive"] = hooked("text", "hook")
        return prompt

    parallel = BASE.on("cpu:2")
    ours, wanted = (host.latent(host.run(graph(each)), SAVE) for each in (parallel, BASE))
    assert_same(ours, wanted)
    assert (wanted - latent(host, BASE, Lora("peft", 0.3))).abs().max() > 10 * TOLERANCE * wanted.abs().max()
