"""Every family in a real ComfyUI: Parallel Loader gives the latents that Load Diffusion Model gives.

FLUX.1 is in test_same_picture.py.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import pytest

from tests import tiny_flux2, tiny_hunyuan_dit, tiny_pixart, tiny_sd3, tiny_sdxl, tiny_wan
from tests.tiny_model import find_by_name, write_original

from .workflow import SAVE, Prompt, Workflow, link, node, sampled_in_pool

pytestmark = pytest.mark.host

TOLERANCE = 1e-4


@dataclass(frozen=True)
class HostFamily:
    """A family's file, and what its nodes make.

    Args:
        spec: its name in the registry.
        config: of a tiny transformer, as wide as ComfyUI fixes it.
        scaled: whether TOLERANCE is of the latent's scale: with random weights it is up to 15 times a flow's.
        workflow: sampler, lengths of the texts, and the latent.
        latent: ComfyUI's node for it; "" is the test pack's, with 16 channels.
        sizes: its inputs beside width and height.
        text: inputs of the test pack's texts.
        values: what the family's text nodes add, for a text of which so many tokens are kept.
        prefix: of the file's keys.
        says: what Parallel Loader or the sampler show.
    """

    spec: str
    config: dict[str, Any]
    workflow: Workflow
    scaled: bool = True
    latent: str = "EmptyLatentImage"
    sizes: dict[str, int] = field(default_factory=dict)
    text: dict[str, int] = field(default_factory=dict)
    values: Callable[[int], dict[str, Any]] | None = None
    prefix: str = ""
    says: str = ""

    def graph(self, workflow: Workflow) -> Prompt:
        """The workflow's graph with the latent and the conditionings as the family's own nodes make them."""
        graph = workflow.prompt()
        _, batch, height, width = workflow.latent
        if self.latent:
            sizes = {"width": width * 8, "height": height * 8, "batch_size": batch, **self.sizes}
            graph["latent"] = node(self.latent, **sizes)
        for name, kept in (("positive", 60), ("negative", 2)):
            graph[name]["inputs"] |= self.text
            if self.values is not None:
                graph[f"{name} text"] = graph[name]
                values = json.dumps(self.values(kept))
                graph[name] = node("TestConditioningValues", conditioning=link(f"{name} text"), values=values)
        return graph


def _hunyuan_values(kept: int) -> dict[str, Any]:
    return {
        "width": 832,
        "height": 1216,
        "attention_mask": {"length": 77, "kept": kept},
        "conditioning_mt5xl": [1, 256, 2048],
        "attention_mask_mt5xl": {"length": 256, "kept": 3 * kept},
    }


_SIZES = {"width": 832, "height": 1216, "crop_w": 64, "crop_h": 0, "target_width": 1024, "target_height": 896}
_UNEQUAL = partial(Workflow, cfg=4.0, lengths=(9, 5))
_PIXART = {"num_attention_heads": 16, "caption_channels": 4096, "num_layers": 1, "use_additional_conditions": True}
FAMILIES = {
    "sd3": HostFamily(
        "sd3",
        tiny_sd3.tiny_config(),
        _UNEQUAL(latent=(0, 1, 9, 7)),
        scaled=False,
        latent="",
    ),
    "flux2": HostFamily("flux2", tiny_flux2.tiny_config(), _UNEQUAL(latent=(0, 1, 9, 7)), scaled=False, latent=""),
    "pixart": HostFamily(
        "pixart",
        tiny_pixart.tiny_config(**_PIXART),
        _UNEQUAL(latent=(0, 1, 34, 42)),
        text={"width": 4096},
        values=lambda kept: {"width": 832, "height": 1216},
    ),
    "hunyuan-dit": HostFamily(
        "hunyuan_dit",
        tiny_hunyuan_dit.tiny_config(**tiny_hunyuan_dit.COMFYUI_TEXTS, num_attention_heads=16),
        Workflow(cfg=4.0, lengths=(77, 77), latent=(0, 2, 9, 14)),
        text={"width": 1024},
        values=_hunyuan_values,
    ),
    # The positive prompt fills the text encoder twice; the latent has an odd side on the way down.
    "sdxl": HostFamily(
        "sdxl",
        tiny_sdxl.recognised_config(),
        Workflow(sampler="dpmpp_2m", scheduler="karras", cfg=5.0, lengths=(154, 77), latent=(0, 1, 10, 12)),
        text={"width": 2048, "pooled": 1280},
        values=lambda kept: _SIZES,
        prefix="model.diffusion_model.",
        says="U-Net (SD 1.5, SDXL",
    ),
    "wan": HostFamily(
        "wan",
        tiny_wan.tiny_config(),
        _UNEQUAL(latent=(0, 1, 7, 10)),
        latent="EmptyHunyuanLatentVideo",
        sizes={"length": 9},
        text={"width": 4096},
    ),
}


@pytest.fixture(scope="module", params=FAMILIES)
def family(host, request):
    """The session's ComfyUI with one family's file, which may be large: its name, and the table's entry."""
    name, entry = request.param, FAMILIES[request.param]
    if name == "flux2":
        host.needs_small_flux()
    path = host.base / "models" / "diffusion_models" / f"{name}.safetensors"
    write_original(find_by_name(entry.spec), path, entry.config, entry.prefix)
    yield name, entry
    path.unlink()


@pytest.mark.long_but_for("sd3", "sdxl")  # Hunyuan-DiT is in test_controlnet.py, Wan in test_wan.py
@pytest.mark.slow
def test_cfg_gives_the_same_latent_per_step_and_in_the_pool(host, family):
    name, entry = family
    workflow = replace(entry.workflow, model=f"{name}.safetensors")
    expected = host.latent(host.run(entry.graph(workflow)), SAVE)
    assert expected.std() > 0.1
    limit = TOLERANCE * (expected.abs().max() if entry.scaled else 1)
    per_step = host.run(entry.graph(workflow.on("cpu:2")))
    in_pool = host.run(entry.graph(workflow.on("cpu:2", "ParallelSampler")))
    for run in (per_step, in_pool):
        latent = host.latent(run, SAVE)
        assert latent.shape == expected.shape
        assert (latent - expected).abs().max() < limit
    assert not entry.says or any(entry.says in text for _, text in per_step.texts), per_step.texts
    assert sampled_in_pool(in_pool.texts)
