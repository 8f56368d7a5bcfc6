"""Nodes that take a MODEL and give one, in a real ComfyUI: what they do to Load Diffusion Model's, they do to ours."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch

from .comfyui_families import FAMILIES
from .test_comfyui_families import write  # noqa: F401 - a fixture
from .workflow import SAMPLER, SAVE, Prompt, Workflow, link, node

pytestmark = pytest.mark.host

TOLERANCE = 1e-4
"""Of the latent's scale."""
FLUX = "flux"
_LAYERS = {"double_layers": "1", "single_layers": "0", "start_percent": 0.0, "end_percent": 0.8}
_WINDOWS: dict[str, Any] = {
    "context_length": 5, "context_overlap": 1, "context_schedule": "standard_static", "context_stride": 1,
    "closed_loop": False, "fuse_method": "pyramid", "freenoise": False,
}  # fmt: skip
_CACHED = {"reuse_threshold": 3.0, "start_percent": 0.1, "end_percent": 0.95, "verbose": False}

_OF_FLUX_ALONE = {"NAGuidance", "USOStyleReference"}
"""The others do as well for the SD3 that stands for it where ComfyUI opens no small FLUX."""
_OF_ONE_ROW = {"FluxKVCache", "USOStyleReference"}
"""ComfyUI's own fail with CFG in one batch."""
_STEP_BY_STEP = {"EasyCache", "LazyCache", "WanContextWindowsManual"}
"""Nodes that act between steps."""

Case = tuple[str, str, dict[str, Any]]
WORKS: dict[str, Case] = {
    "SkipLayerGuidanceDiT, FLUX": (FLUX, "SkipLayerGuidanceDiT", {**_LAYERS, "scale": 3.0, "rescaling_scale": 0.2}),
    "SkipLayerGuidanceDiT, the last layers": (
        FLUX, "SkipLayerGuidanceDiT", {**_LAYERS, "single_layers": "1", "scale": 3.0, "rescaling_scale": 0.0}
    ),
    "SkipLayerGuidanceDiTSimple, Wan": ("wan-t2v", "SkipLayerGuidanceDiTSimple", {**_LAYERS, "double_layers": "0"}),
    "SkipLayerGuidanceSD3": (
        "sd3", "SkipLayerGuidanceSD3", {"layers": "0", "scale": 3.0, "start_percent": 0.0, "end_percent": 0.8}
    ),
    "PerturbedAttentionGuidance": ("sd15", "PerturbedAttentionGuidance", {"scale": 3.0}),
    "NAGuidance, FLUX": (FLUX, "NAGuidance", {"nag_scale": 5.0, "nag_alpha": 0.5, "nag_tau": 1.5}),
    "FluxKVCache": ("flux-2", "FluxKVCache", {}),
    "EasyCache": ("wan-t2v", "EasyCache", _CACHED),
    "LazyCache": (FLUX, "LazyCache", _CACHED),
    "LTXVSpatioTemporalGuidance": (
        "ltx-2", "LTXVSpatioTemporalGuidance", {"scale": 1.0, "blocks": "1", "start_percent": 0.0, "end_percent": 1.0}
    ),
    "LTXVModalityGuidance": (
        "ltx-2", "LTXVModalityGuidance", {"modality_scale": 3.0, "start_percent": 0.0, "end_percent": 1.0}
    ),
    "WanContextWindowsManual": (
        "wan-t2v",
        "WanContextWindowsManual",
        {**_WINDOWS, "retain_first_frame": False, "split_conds_to_windows": False},
    ),
    "USOStyleReference, whose network is brought to the ranks": (
        FLUX,
        "USOStyleReference",
        {"model_patch": link("network"), "clip_vision_output": link("seen")},
    ),
}  # fmt: skip
"""name -> (family, type of node, inputs)."""


def with_node(graph: Prompt, kind: str, inputs: dict[str, Any]) -> Prompt:
    """The graph with a node behind the loader's MODEL."""
    graph["unpatched"] = graph.pop("model")
    graph["model"] = node(kind, model=link("unpatched"), **inputs)
    if "model_patch" in inputs:
        graph |= {"network": node("TestStyleNetwork", width=512, seed=0), "seen": node("TestClipVisionOutput")}
    return graph


def graph_of(family: str, workflow: Workflow) -> Prompt:
    """The family's graph."""
    return workflow.prompt() if family == FLUX else FAMILIES[family].graph(workflow)


@pytest.fixture(scope="module")
def plain(host, write) -> Callable[[str, Workflow], torch.Tensor]:  # noqa: F811
    """Load Diffusion Model's latents without a node, each made once."""
    return cache(lambda family, workflow: host.latent(host.run(graph_of(family, workflow)), SAVE))


@pytest.mark.long_but_for(
    "SkipLayerGuidanceDiT, the last layers",
    "PerturbedAttentionGuidance",
    "NAGuidance, FLUX",
    "FluxKVCache",
    "EasyCache",
    "LTXVSpatioTemporalGuidance",
    "LTXVModalityGuidance",
    "WanContextWindowsManual",
    "USOStyleReference, whose network is brought to the ranks",
)
@pytest.mark.slow
@pytest.mark.parametrize("name", WORKS)
def test_a_node_gives_the_latent_that_it_gives_with_comfyuis_own_loader(host, write, plain, name):  # noqa: F811
    family, kind, inputs = WORKS[name]
    workflow = Workflow(cfg=3.0, steps=10 if "Cache" in kind else 4)
    if kind in _OF_ONE_ROW:
        workflow = replace(workflow, cfg=1.0)
    if kind in _OF_FLUX_ALONE:
        host.needs_small_flux()
    if family != FLUX:
        workflow = replace(workflow, model=write(family))
    wanted = host.latent(host.run(with_node(graph_of(family, workflow), kind, inputs)), SAVE)
    scale = wanted.abs().max()
    assert (wanted - plain(family, workflow)).abs().max() > 100 * TOLERANCE * scale  # or else nothing would show
    for devices in ("cpu:3", "cpu:1"):  # of one pool, as the larger one is first
        run = host.run(with_node(graph_of(family, workflow.on(devices)), kind, inputs))
        assert run.error is None, run.error["exception_message"]
        assert (host.latent(run, SAVE) - wanted).abs().max() < TOLERANCE * scale, devices
        assert (host.last_run()["loop"] == "pool") is (kind not in _STEP_BY_STEP), host.last_run()


def renamed(graph: Prompt) -> Prompt:
    """The graph, of which no node is one of another graph."""
    other = json.loads(json.dumps(graph))
    for each in other.values():
        for name, value in each["inputs"].items():
            if isinstance(value, list):
                each["inputs"][name] = [f"other {value[0]}", value[1]]
    return {f"other {name}": each for name, each in other.items()}


@pytest.mark.slow
def test_networks_beside_two_models_of_one_file_are_told_apart(host):
    host.needs_small_flux()
    _, kind, inputs = WORKS["USOStyleReference, whose network is brought to the ranks"]

    def graph(workflow: Workflow, seed: int) -> Prompt:
        made = with_node(workflow.prompt(), kind, inputs)
        made["network"]["inputs"]["seed"] = seed
        return made

    workflow = Workflow(cfg=1.0, steps=2)
    first, second = (host.latent(host.run(graph(workflow, seed)), SAVE) for seed in (0, 1))
    scale = first.abs().max()
    assert (first - second).abs().max() > 100 * TOLERANCE * scale
    other = graph(workflow.on("cpu:2"), 1)
    other["config"]["inputs"]["attention"] = "sdpa"  # loaders that are alike are one to ComfyUI
    run = host.run(graph(workflow.on("cpu:2"), 0) | renamed(other))
    for place, wanted in ((SAVE, first), (f"other {SAVE}", second)):
        assert (host.latent(run, place) - wanted).abs().max() < TOLERANCE * scale, place


NOTHING: dict[str, tuple[str, dict[str, Any]]] = {
    "ModelComputeDtype": ("ModelComputeDtype", {"dtype": "default"}),
    "ModelAttentionBackend": ("ModelAttentionBackend", {"attention": "pytorch attention"}),
}
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "SelfAttentionGuidance": ({"scale": 0.5, "blur_sigma": 2.0}, "SelfAttentionGuidance sets.*attention maps"),
    "HyperTile": (
        {"tile_size": 256, "swap_size": 2, "max_depth": 0, "scale_depth": False}, "HyperTile sets.*random numbers"
    ),
    "ModelComputeDtype": ({"dtype": "bf16"}, "compute dtype.*weight_dtype in Parallel Loader"),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("name", NOTHING)
@pytest.mark.parametrize("sampler_node", ["KSampler", "ParallelSampler"])
def test_a_node_that_asks_for_what_there_is_changes_nothing(host, name, sampler_node):
    workflow = Workflow(cfg=3.0)
    wanted = host.latent(host.run(with_node(workflow.prompt(), *NOTHING[name])), SAVE)
    run = host.run(with_node(workflow.on("cpu:2", sampler_node).prompt(), *NOTHING[name]))
    assert run.error is None, run.error["exception_message"]
    assert (host.latent(run, SAVE) - wanted).abs().max() < TOLERANCE * wanted.abs().max()


@pytest.mark.slow_but_for("HyperTile")
@pytest.mark.parametrize("name", REFUSED)
def test_a_node_that_cannot_be_carried_is_named_before_the_first_step(host, name):
    inputs, says = REFUSED[name]
    run = host.run(with_node(Workflow(loader="cpu:2", cfg=3.0).prompt(), name, inputs))
    assert run.error is not None
    assert re.search(says, run.error["exception_message"]), run.error["exception_message"]
    assert not [step for node, step, _ in run.progress if node == SAMPLER and step > 0]
