"""ComfyUI's own networks in the pool, in a real ComfyUI: the latents that Load Diffusion Model gives."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.comfyui_networks.formats import FORMATS

from .older_host import name_version
from .test_graph_stays_a_graph import pool_pids
from .workflow import MODEL, SAMPLER, SAVE, Workflow, link, node, sampled_in_pool

pytestmark = pytest.mark.host

TOLERANCE = 1e-4
"""Of the latent's scale."""
ROUNDED = {"int8_tensorwise": 0.05, "int8_rotated": 0.05}
"""Formats whose products take one scale for all rows of a call: ranks that share them out each have their own, and so
has ComfyUI when it cuts a batch. The bound is that rounding's; with one rank and one row it is nothing."""

CASES = {
    "plain": Workflow(),
    "cfg, unequal prompts": Workflow(cfg=4.0, lengths=(9, 5)),
    "cfg, batch, odd sizes": Workflow(cfg=4.0, latent=(0, 2, 13, 19), sampler="dpmpp_2m", scheduler="beta"),
    "a reference latent": Workflow(reference=True, cfg=4.0),
    "noise mask": Workflow(latent=(9, 1, 14, 20), mask=True, cfg=4.0),
    "a bf16 file": Workflow(model="bf16.safetensors", cfg=4.0),
}


def compare(host, workflow: Workflow, parallel: Workflow, tolerance: float = TOLERANCE) -> list[tuple[str, str]]:
    """Assert that both make the same latent; return what the parallel run showed on its nodes."""
    ours = host.run(parallel.prompt())
    latent, wanted = host.latent(ours, SAVE), host.latent(host.run(workflow.prompt()), SAVE)
    assert wanted.std() > 0.1
    assert latent.shape == wanted.shape
    assert (latent - wanted).abs().max() < tolerance * wanted.abs().max()
    return ours.texts


@pytest.mark.long_but_for("a bf16 file")
@pytest.mark.slow_but_for("cfg, batch, odd sizes", "a reference latent")
@pytest.mark.parametrize("name", CASES)
def test_flux_through_comfyuis_network_under_ksampler(host, name):
    workflow = CASES[name]
    compare(host, workflow, workflow.on("cpu:2"))


@pytest.mark.long_but_for("cfg, batch, odd sizes")
@pytest.mark.slow
@pytest.mark.parametrize("name", ["cfg, unequal prompts", "cfg, batch, odd sizes", "a reference latent"])
def test_flux_through_comfyuis_network_in_the_pool(host, name):
    workflow = CASES[name]
    parallel = workflow.on("cpu:2", "ParallelSampler")
    assert sampled_in_pool(compare(host, workflow, parallel))


@pytest.mark.long_but_for("ParallelSampler-negative")
@pytest.mark.slow_but_for("KSampler-positive")
@pytest.mark.parametrize(
    ("sampler_node", "side"),
    [("KSampler", "positive"), ("ParallelSampler", "positive"), ("ParallelSampler", "negative")],
)
def test_what_the_network_itself_does_not_take_costs_the_prompt_and_not_the_pool(host, sampler_node, side):
    """The negative's is a branch that one rank has alone."""
    workflow = Workflow(steps=2, cfg=4.0 if side == "negative" else 1.0)
    parallel = workflow.on("cpu:2", sampler_node)
    if sampler_node == "ParallelSampler":
        compare(host, workflow, workflow.on("cpu:3", sampler_node))
    compare(host, workflow, parallel)  # maybe in a pool with a rank that has no part in it
    processes = pool_pids(host)
    wrong = parallel.prompt()
    wrong[side]["inputs"]["width"] = 63
    run = host.run(wrong)
    assert run.error is not None
    assert run.error["node_id"] == SAMPLER
    said = run.error["exception_message"]
    assert said.startswith("The model failed with RuntimeError: mat1 and mat2 shapes"), said
    compare(host, replace(workflow, seed=6), replace(parallel, seed=6))  # not out of ComfyUI's cache
    assert processes
    assert pool_pids(host) == processes


@pytest.mark.long_but_for("nvfp4", "int8_rotated")
@pytest.mark.slow_but_for("scaled_fp8")
@pytest.mark.parametrize("name", FORMATS)
def test_files_stay_in_their_format_and_give_comfyuis_latent(host, has_format, name):
    if not has_format(name):
        pytest.skip(f"{name_version(host.host.path)} has no {name}")
    workflow = Workflow(model=f"{name}.safetensors", cfg=4.0, lengths=(9, 5), steps=2)
    compare(host, workflow, workflow.on("cpu:2"), ROUNDED.get(name, TOLERANCE))


@pytest.mark.long_but_for("int8_rotated")
@pytest.mark.slow
@pytest.mark.parametrize("name", ROUNDED)
def test_one_rank_rounds_an_int8_file_as_comfyui_does(host, has_format, name):
    if not has_format(name):
        pytest.skip(f"{name_version(host.host.path)} has no {name}")
    workflow = Workflow(model=f"{name}.safetensors", steps=2)
    compare(host, workflow, workflow.on("cpu:1"))


@pytest.mark.slow
@pytest.mark.parametrize("sampler_node", ["KSampler", pytest.param("ParallelSampler", marks=pytest.mark.long)])
def test_one_rank_gives_the_bits_of_load_diffusion_model_with_comfyuis_attention(host, has_format, sampler_node):
    """One call of two rows, and two calls, also of an int8 file, which turns last bits into quantisation levels."""
    for workflow in (
        Workflow(cfg=4.0, steps=3),
        Workflow(model="int8_tensorwise.safetensors", cfg=4.0, steps=3),
        Workflow(model="int8_tensorwise.safetensors", cfg=4.0, lengths=(9, 5), steps=3),
    ):
        if workflow.model != MODEL and not has_format(workflow.model.removesuffix(".safetensors")):
            continue  # an older ComfyUI
        parallel = replace(workflow.on("cpu:1", sampler_node), attention="ComfyUI")
        latent, wanted = (host.latent(host.run(each.prompt()), SAVE) for each in (parallel, workflow))
        assert wanted.std() > 0.1
        assert torch.equal(latent, wanted)


def test_a_checkpoints_model_runs_in_the_pool_beside_comfyuis_clip_and_vae(host):
    folder = host.base / "models" / "checkpoints"
    file = folder / "whole.safetensors"
    folder.mkdir(exist_ok=True)
    tensors = load_file(host.base / "models" / "diffusion_models" / MODEL)
    whole = {f"model.diffusion_model.{name}": tensor for name, tensor in tensors.items()}
    save_file({**whole, "text_encoders.clip_l.logit_scale": torch.zeros(())}, file)
    try:
        workflow = Workflow(cfg=4.0, lengths=(9, 5), steps=2)
        native, parallel = workflow.prompt(), workflow.on("cpu:2").prompt()
        native["model"] = node("CheckpointLoaderSimple", ckpt_name=file.name)
        inputs = {"weight_dtype": "default", "parallel_config": link("config")}
        parallel["model"] = node("ParallelCheckpointLoader", ckpt_name=file.name, **inputs)
        latent, wanted = (host.latent(host.run(graph), SAVE) for graph in (parallel, native))
    finally:
        file.unlink()
    assert wanted.std() > 0.1
    assert (latent - wanted).abs().max() < TOLERANCE * wanted.abs().max()


@pytest.mark.long_but_for("fp8_e4m3fn")
@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["fp8_e4m3fn", "fp8_e4m3fn_fast", "fp8_e5m2"])
def test_a_plain_file_is_cast_to_float8_as_load_diffusion_model_does(host, dtype):
    workflow = Workflow(cfg=4.0, lengths=(9, 5), steps=2, weight_dtype=dtype)
    compare(host, workflow, workflow.on("cpu:2"))
