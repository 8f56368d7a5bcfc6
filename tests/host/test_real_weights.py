"""Nodes that want the weights of a MODEL whose network is in the pool: they get the file's, or one sentence."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file

from benchmarks.in_comfyui.defaults import fill

from .older_host import skip_as_older
from .workflow import SAMPLER, SAVE, Prompt, Workflow, link, node

pytestmark = pytest.mark.host

POOL, NATIVE = Workflow(loader="cpu:2"), Workflow()


def with_saved(workflow: Workflow, prefix: str) -> Prompt:
    graph = workflow.prompt()
    for name in (SAVE, SAMPLER, "positive", "negative", "latent"):
        graph.pop(name)
    return {**graph, "saved": node("ModelSave", model=link("model"), filename_prefix=prefix)}


@pytest.mark.slow
def test_model_save_writes_what_it_writes_of_comfyuis_own_model(host):
    for name, workflow in (("ours", POOL), ("native", NATIVE)):
        run = host.run(with_saved(workflow, f"saved/{name}"))
        assert run.error is None, run.error["exception_message"]
    ours, native = (
        load_file(next((host.base / "output" / "saved").glob(f"{name}*.safetensors"))) for name in ("ours", "native")
    )
    assert ours.keys() == native.keys()
    assert all(torch.equal(ours[key], native[key]) for key in native)


def merged(first: Workflow, second: Workflow) -> Prompt:
    """The second's graph with its MODEL merged into the first's."""
    graph = first.prompt()
    for name, each in second.prompt().items():
        if name in ("model", "config", "loader"):
            inputs = {key: link("second config") if key == "parallel_config" else value
                      for key, value in each["inputs"].items()}  # fmt: skip
            graph[f"second {name}"] = {**each, "inputs": inputs}
    graph["merged"] = node("ModelMergeSimple", model1=link("model"), model2=link("second model"), ratio=0.4)
    graph[SAMPLER]["inputs"]["model"] = link("merged")
    return graph


@pytest.mark.slow
def test_ours_is_merged_into_comfyuis_own_with_the_weights_of_the_file(host):
    other = "plan.safetensors"
    wanted = host.latent(host.run(merged(NATIVE, replace(NATIVE, model=other))), SAVE)
    run = host.run(merged(NATIVE, replace(POOL, model=other)))
    assert run.error is None, run.error["exception_message"]
    latent = host.latent(run, SAVE)
    assert (latent - wanted).abs().max() < 1e-4 * wanted.abs().max()
    assert (latent - host.latent(host.run(NATIVE.prompt()), SAVE)).abs().max() > 0.01 * wanted.abs().max()


@pytest.mark.slow
def test_another_model_is_not_merged_into_ours_which_one_sentence_says(host):
    run = host.run(merged(POOL, replace(NATIVE, model="plan.safetensors")))
    assert run.error is not None
    assert run.error["node_id"] == "merged"
    assert "merge" in run.error["exception_message"]
    assert "Load Diffusion Model" in run.error["exception_message"]


def with_read(workflow: Workflow, run: bool = False) -> Prompt:
    graph = with_saved(workflow, "")
    graph.pop("saved")
    graph["read"] = node("TestWeights", model=link("model"), run=run)
    return {**graph, SAVE: node("SaveLatent", samples=link("read"), filename_prefix="latents/test")}


@pytest.mark.slow
def test_a_node_that_reads_the_networks_weights_gets_those_of_the_file(host):
    ours, native = (host.latent(host.run(with_read(workflow)), SAVE) for workflow in (POOL, NATIVE))
    assert native.std() > 0
    assert torch.equal(ours, native)


@pytest.mark.slow
def test_a_node_that_runs_a_layer_of_the_network_is_told_where_it_is(host):
    run = host.run(with_read(POOL, run=True))
    assert run.error is not None
    assert "no node can run a part of them (a Linear layer)" in run.error["exception_message"]


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["LoraSave", "TrainLoraNode"])
def test_a_node_that_computes_with_weights_or_trains_is_told_in_one_sentence(host, kind):
    graph = POOL.prompt()
    for name in (SAVE, SAMPLER, "negative"):
        graph.pop(name)
    if kind == "LoraSave":
        inputs = {"filename_prefix": "loras/test", "rank": 2, "lora_type": "standard", "bias_diff": False}
        graph["saved"] = node(kind, model_diff=link("model"), **inputs)
    else:
        graph["trained"] = node(kind, model=link("model"), latents=link("latent"), positive=link("positive"))
        infos = host.get("/object_info")
        graph = fill(graph, infos, "off")
        trained = infos[kind]["output"].index("LORA_MODEL")
        graph["saved"] = node("SaveLoRA", lora=link("trained", trained), prefix="loras/test")
    run = host.run(graph)
    if kind == "LoraSave" and run.error is None:  # it catches every error of a single weight
        skip_as_older(host.host.path, "has a LoraSave that writes a file without the weights that it was refused")
    assert run.error is not None
    if kind == "TrainLoraNode" and "meta tensor" in run.error["exception_message"]:
        skip_as_older(host.host.path, "copies the network before it asks for its weights, and says so")
    assert "in the worker processes, where no node can" in run.error["exception_message"]
    assert "Load Diffusion Model" in run.error["exception_message"]
