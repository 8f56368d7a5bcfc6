"""SDXL in a real ComfyUI: Parallel Loader gives the latents that Load Diffusion Model gives."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch

from parallel_runtime.networks.diffusers.sdxl import SDXL
from tests.tiny_model import write_original
from tests.tiny_sdxl import recognised_config, write_pipeline

from .workflow import SAVE, Prompt, Workflow, link, node, sampled_in_pool

pytestmark = pytest.mark.host

TOLERANCE = 1e-4
"""Of the latent's scale."""
# The positive prompt fills the text encoder twice; the latent has an odd side on the way down.
WORKFLOW = Workflow(
    model="sdxl.safetensors", sampler="dpmpp_2m", scheduler="karras", cfg=5.0, lengths=(154, 77), latent=(0, 1, 10, 12)
)


@pytest.fixture(scope="module")
def sdxl(host) -> Iterator:
    """The session's ComfyUI, with a U-Net in both layouts. The files are large: ComfyUI fixes the widths."""
    models = host.base / "models"
    file = write_original(
        SDXL, models / "diffusion_models" / "sdxl.safetensors", recognised_config(), "model.diffusion_model."
    )
    folder = write_pipeline(models / "diffusers" / "sdxl", recognised_config())
    yield host
    file.unlink()
    shutil.rmtree(folder)


def graph_of(workflow: Workflow) -> Prompt:
    """The workflow's graph with a latent of four channels and conditionings as CLIPTextEncodeSDXL makes them."""
    graph = workflow.prompt()
    _, batch, height, width = workflow.latent
    graph["latent"] = node("EmptyLatentImage", width=width * 8, height=height * 8, batch_size=batch)
    sizes = {"width": 832, "height": 1216, "crop_w": 64, "crop_h": 0, "target_width": 1024, "target_height": 896}
    for name in ("positive", "negative"):
        graph[name]["inputs"] |= {"width": 2048, "pooled": 1280}
        graph[f"{name} text"] = graph[name]
        graph[name] = node("TestConditioningValues", conditioning=link(f"{name} text"), values=json.dumps(sizes))
    return graph


def _assert_same(latent: torch.Tensor, expected: torch.Tensor) -> None:
    assert expected.std() > 0.1
    assert latent.shape == expected.shape
    assert (latent - expected).abs().max() < TOLERANCE * expected.abs().max()


@pytest.mark.slow
def test_cfg_gives_the_same_latent_per_step_and_in_the_pool_in_both_layouts(sdxl):
    expected = sdxl.latent(sdxl.run(graph_of(WORKFLOW)), SAVE)
    per_step = sdxl.run(graph_of(WORKFLOW.on("cpu:2")))
    _assert_same(sdxl.latent(per_step, SAVE), expected)
    assert any("SDXL is a U-Net" in text for _, text in per_step.texts), per_step.texts
    in_pool = sdxl.run(graph_of(replace(WORKFLOW.on("cpu:2", "ParallelSampler"), model="sdxl/")))
    _assert_same(sdxl.latent(in_pool, SAVE), expected)
    assert sampled_in_pool(in_pool.texts)
