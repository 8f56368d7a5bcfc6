"""PixArt and HunyuanDiT in a real ComfyUI: Parallel Loader gives the latents that Load Diffusion Model gives."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

from parallel_runtime.networks.diffusers.hunyuan_dit import HUNYUAN_DIT
from parallel_runtime.networks.diffusers.pixart import PIXART
from tests import tiny_hunyuan_dit, tiny_pixart
from tests.tiny_model import write_diffusers_folder, write_original

from .workflow import SAVE, Prompt, Workflow, link, node, sampled_in_pool

pytestmark = pytest.mark.host

TOLERANCE = 1e-4
"""Of the latent's scale: noise of these models is up to 15 times as large as a flow's."""
FAMILIES = {
    "pixart": (
        PIXART,
        tiny_pixart.tiny_config(
            num_attention_heads=16, caption_channels=4096, num_layers=1, use_additional_conditions=True
        ),
        "PixArtAlphaPipeline",
    ),
    "hunyuan-dit": (
        HUNYUAN_DIT,
        tiny_hunyuan_dit.tiny_config(**tiny_hunyuan_dit.COMFYUI_TEXTS, num_attention_heads=16),
        "HunyuanDiTPipeline",
    ),
}
WORKFLOWS = {
    "pixart": Workflow(model="pixart.safetensors", cfg=4.0, lengths=(9, 5), latent=(0, 1, 34, 42)),
    "hunyuan-dit": Workflow(model="hunyuan-dit.safetensors", cfg=4.0, lengths=(77, 77), latent=(0, 2, 9, 14)),
}


@pytest.fixture(scope="module")
def families(host) -> Iterator:
    """The session's ComfyUI, with tiny files of these families in both layouts. They are large: widths are fixed."""
    models = host.base / "models"
    for name, (spec, config, pipeline) in FAMILIES.items():
        write_original(spec, models / "diffusion_models" / f"{name}.safetensors", config)
        write_diffusers_folder(spec, models / "diffusers" / name, config, pipeline=pipeline)
    yield host
    for name in FAMILIES:
        (models / "diffusion_models" / f"{name}.safetensors").unlink()
        shutil.rmtree(models / "diffusers" / name)


def graph_of(family: str, workflow: Workflow) -> Prompt:
    """The workflow's graph with a latent of four channels, and conditionings as the family's text nodes make them."""
    graph = workflow.prompt()
    _, batch, height, width = workflow.latent
    graph["latent"] = node("EmptyLatentImage", width=width * 8, height=height * 8, batch_size=batch)
    for name, kept in (("positive", 60), ("negative", 2)):
        graph[f"{name} text"] = graph[name]
        values: dict[str, Any] = {"width": 832, "height": 1216}
        graph[name]["inputs"]["width"] = 4096
        if family == "hunyuan-dit":
            graph[name]["inputs"]["width"] = 1024
            values |= {
                "attention_mask": {"length": 77, "kept": kept},
                "conditioning_mt5xl": [1, 256, 2048],
                "attention_mask_mt5xl": {"length": 256, "kept": 3 * kept},
            }
        graph[name] = node("TestConditioningValues", conditioning=link(f"{name} text"), values=json.dumps(values))
    return graph


def latent_of(host, family: str, workflow: Workflow) -> torch.Tensor:
    """What the graph saves."""
    return host.latent(host.run(graph_of(family, workflow)), SAVE)


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_cfg_gives_the_same_latent_per_step_and_in_the_pool_in_both_layouts(families, family):
    workflow = WORKFLOWS[family]
    expected = latent_of(families, family, workflow)
    assert expected.std() > 0.1
    per_step = latent_of(families, family, workflow.on("cpu:2"))
    assert per_step.shape == expected.shape
    assert (per_step - expected).abs().max() < TOLERANCE * expected.abs().max()
    run = families.run(graph_of(family, replace(workflow.on("cpu:2", "ParallelSampler"), model=f"{family}/")))
    in_pool = families.latent(run, SAVE)
    assert (in_pool - expected).abs().max() < TOLERANCE * expected.abs().max()
    assert sampled_in_pool(run.texts)
