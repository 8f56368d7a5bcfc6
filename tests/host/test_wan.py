"""Wan's videos in a real ComfyUI: Parallel Loader gives the latents that Load Diffusion Model gives."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from parallel_runtime.networks.diffusers.wan import WAN
from tests.tiny_model import write_original
from tests.tiny_wan import image_config, tiny_config

from .workflow import SAVE, Prompt, Workflow, link, node, sampled_in_pool

pytestmark = pytest.mark.host

SAMPLER_NODES = ["KSampler", pytest.param("ParallelSampler", marks=pytest.mark.long)]
TOLERANCE = 1e-4
"""Of the latent's scale, which the random weights make ten times as large as real ones do."""
TEXT, IMAGE, LARGE_VAE = "wan-text.safetensors", "wan-image.safetensors", "wan-5b.safetensors"
UNEQUAL = Workflow(model=TEXT, cfg=4.0, lengths=(9, 5), latent=(0, 1, 7, 10))
VIDEOS = {
    "euler, unequal prompts, odd size": UNEQUAL,
    "dpmpp_2m, beta, batch": replace(
        UNEQUAL, sampler="dpmpp_2m", scheduler="beta", lengths=(6, 6), latent=(0, 2, 8, 6)
    ),
    "uni_pc": replace(UNEQUAL, sampler="uni_pc", steps=5),
    "noise mask, ancestral": replace(UNEQUAL, sampler="euler_ancestral", mask=True),
    "extra input channels": replace(UNEQUAL, model=IMAGE),
    "Wan 2.2 5B": replace(UNEQUAL, model=LARGE_VAE, latent=(0, 1, 8, 8)),
}
CLIP, TWO_CLIPS = "wan-clip.safetensors", "wan-two-clips.safetensors"
_SEEN = {"fields": {"penultimate_hidden_states": [1, 257, 1280]}}
_START = {"concat_latent_image": [1, 16, 3, 7, 10], "concat_mask": [1, 1, 3, 7, 10]}
OTHERS = {
    "2.2 5B from an image: a noise mask, and a timestep per frame": (
        replace(UNEQUAL, model=LARGE_VAE, latent=(0, 1, 8, 8), mask=True), {}
    ),
    "from an image, without CLIP vision": (replace(UNEQUAL, model=CLIP), _START),
    "from an image, with a prompt of another length": (
        replace(UNEQUAL, model=CLIP, lengths=(9, 9)), {"clip_vision_output": _SEEN, **_START}
    ),
    "CLIP vision without an image embedder": (
        replace(UNEQUAL, model=IMAGE), {"clip_vision_output": _SEEN, **_START}
    ),
    "first and last frame, with one side": (
        replace(UNEQUAL, model=TWO_CLIPS, lengths=(512, 512), steps=2),
        {"clip_vision_output": _SEEN, **_START},
    ),
}  # fmt: skip
"""What more comes with a picture, and what is left out of it."""
FRAMES = 9
"""Frames of the video, which are three in the latent."""


@pytest.fixture(scope="module")
def wan(host):
    """The session's ComfyUI, with tiny Wan files."""
    files = host.base / "models" / "diffusion_models"
    write_original(WAN, files / TEXT, tiny_config(), prefix="model.diffusion_model.")
    write_original(WAN, files / IMAGE, tiny_config(in_channels=36, num_layers=1))
    write_original(WAN, files / CLIP, image_config())
    write_original(WAN, files / TWO_CLIPS, image_config(pos_embed_seq_len=514))
    write_original(WAN, files / LARGE_VAE, tiny_config(in_channels=48, out_channels=48, num_layers=1))
    return host


def video(workflow: Workflow) -> Prompt:
    """The workflow's graph with a video latent and texts as wide as Wan's."""
    graph = workflow.prompt()
    _, batch, height, width = workflow.latent
    graph["latent"] = node(
        "EmptyHunyuanLatentVideo", width=width * 8, height=height * 8, length=FRAMES, batch_size=batch
    )
    for name in ("positive", "negative"):
        graph[name]["inputs"]["width"] = 4096
    return graph


@pytest.mark.slow
@pytest.mark.parametrize("sampler_node", SAMPLER_NODES)
@pytest.mark.parametrize("name", VIDEOS)
def test_a_video_latent_is_the_same_per_step_and_in_the_pool(wan, name, sampler_node):
    workflow = VIDEOS[name]
    ours = wan.run(video(workflow.on("cpu:2", sampler_node)))
    latent, expected = wan.latent(ours, SAVE), wan.latent(wan.run(video(workflow)), SAVE)
    assert latent.shape == expected.shape
    assert latent.ndim == 5
    assert expected.std() > 0.1
    assert (latent - expected).abs().max() < TOLERANCE * expected.abs().max()
    if sampler_node == "ParallelSampler" and workflow.model != IMAGE:
        assert sampled_in_pool(ours.texts)


def with_values(graph: Prompt, values: dict) -> Prompt:
    """The graph with more in both conditionings, as a node of Wan's puts there."""
    for name in ("positive", "negative") if values else ():
        graph[f"{name} text"] = graph[name]
        graph[name] = node("TestConditioningValues", conditioning=link(f"{name} text"), values=json.dumps(values))
    return graph


@pytest.mark.slow_but_for("KSampler-2.2 5B from an image: a noise mask, and a timestep per frame")
@pytest.mark.parametrize("name", OTHERS)
@pytest.mark.parametrize("sampler_node", SAMPLER_NODES)
def test_a_video_from_a_picture_is_the_same(wan, name, sampler_node):
    workflow, values = OTHERS[name]
    ours = wan.run(with_values(video(workflow.on("cpu:2", sampler_node)), values))
    assert ours.error is None, ours.error["exception_message"]
    latent = wan.latent(ours, SAVE)
    expected = wan.latent(wan.run(with_values(video(workflow), values)), SAVE)
    assert expected.std() > 0.1
    assert (latent - expected).abs().max() < TOLERANCE * expected.abs().max()


@pytest.mark.slow
def test_the_text_of_another_model_stops_with_a_message_that_names_the_width(wan):
    workflow = replace(UNEQUAL, loader="cpu:2", model=TEXT)
    graph = video(workflow)
    graph["positive"]["inputs"]["width"] = 64
    run = wan.run(graph)
    assert run.error is not None
    assert "4096" in run.error["exception_message"]
