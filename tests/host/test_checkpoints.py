"""Checkpoints with more than a network, in a real ComfyUI: Parallel Checkpoint Loader against Load Checkpoint."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests import tiny_sdxl
from tests.tiny_model import find_by_name, write_original

from .comfyui_families import FAMILIES, LARGE_FAMILIES
from .older_host import skip_as_older
from .small_files import write_small_files
from .workflow import SAVE, Prompt, Workflow, link, node

pytestmark = pytest.mark.host

TOLERANCE = 1e-4
"""Of the latent's scale."""


@pytest.fixture
def checkpoint(host):
    """Where a checkpoint may be written."""
    folder = host.base / "models" / "checkpoints"
    folder.mkdir(exist_ok=True)
    yield folder / "whole.safetensors"
    (folder / "whole.safetensors").unlink(missing_ok=True)


def compare(host, file: Path, native: Prompt, parallel: Prompt) -> torch.Tensor:
    """Assert that both loaders give the same latent; return it."""
    native["model"] = node("CheckpointLoaderSimple", ckpt_name=file.name)
    inputs = {"weight_dtype": "default", "parallel_config": link("config")}
    parallel["model"] = node("ParallelCheckpointLoader", ckpt_name=file.name, **inputs)
    latent, wanted = (host.latent(host.run(graph), SAVE) for graph in (parallel, native))
    assert wanted.std() > 0.1
    assert (latent - wanted).abs().max() < TOLERANCE * wanted.abs().max()
    return wanted


def small_file(host, folder: Path, name: str) -> dict[str, torch.Tensor]:
    """Tensors of a family's small file."""
    written = folder / f"{name}.safetensors"
    if unknown := write_small_files(host, folder, [name]):
        skip_as_older(host.host.path, f"does not know {name} ({unknown[name]})")
    try:
        return load_file(written)
    finally:
        written.unlink(missing_ok=True)


@pytest.mark.parametrize(
    ("name", "prefix"),
    [
        ("stable-audio-3", "model.model."),
        pytest.param("zero123", "model.diffusion_model.", marks=pytest.mark.long),
    ],
)
@pytest.mark.slow
def test_weights_beside_the_network_are_read(host, checkpoint, name, prefix):
    beside = ("conditioner.", "cc_projection.")
    tensors = small_file(host, checkpoint.parent, name)
    whole = {key if key.startswith(beside) else prefix + key: value for key, value in tensors.items()}
    if name.startswith("stable-audio"):  # as its text encoder's padding is
        padding = torch.randn(768, generator=torch.Generator().manual_seed(0))
        whole["conditioner.conditioners.prompt.padding_embedding"] = padding
    save_file(whole, checkpoint)
    family, workflow = (FAMILIES | LARGE_FAMILIES)[name], Workflow(cfg=4.0, steps=2)
    compare(host, checkpoint, family.graph(workflow), family.graph(workflow.on("cpu:2")))


@pytest.mark.slow
def test_a_checkpoint_says_how_it_is_sampled(host, checkpoint):
    write_original(find_by_name("sdxl"), checkpoint, tiny_sdxl.recognised_config(), "model.diffusion_model.")
    tensors = load_file(checkpoint)
    workflow = Workflow(cfg=4.0, steps=2, latent=(0, 1, 16, 24))

    def graph(each: Workflow) -> Prompt:
        made = each.prompt()
        made["latent"] = node("EmptyLatentImage", width=192, height=128, batch_size=1)
        for name in ("positive", "negative"):
            made[name]["inputs"] |= {"width": 2048, "pooled": 1280}
        return made

    latents = []
    for said in ({}, {"v_pred": torch.zeros(0), "ztsnr": torch.zeros(0)}):
        save_file(tensors | said, checkpoint)
        latents.append(compare(host, checkpoint, graph(workflow), graph(workflow.on("cpu:2"))))
    assert (latents[0] - latents[1]).abs().max() > 0.1 * latents[0].abs().max()


@pytest.mark.slow
def test_what_sees_pictures_in_a_checkpoint_is_given(host, checkpoint):
    whole = {f"model.{key}": value for key, value in small_file(host, checkpoint.parent, "hunyuan-3d-2").items()}
    # By this name ComfyUI knows the image encoder of Hunyuan3D.
    seeing = "conditioner.main_image_encoder.model.encoder.layer.23.layer_scale2.lambda1"
    shown = {}
    for name, more in (("without", {}), ("with", {seeing: torch.zeros(1024)})):
        save_file(whole | more, checkpoint)
        graph = {
            "config": Workflow().on("cpu:2").prompt()["config"],
            "model": node(
                "ParallelCheckpointLoader",
                ckpt_name=checkpoint.name,
                weight_dtype="default",
                parallel_config=link("config"),
            ),
            "shown": node("PreviewAny", source=link("model", 3)),
        }
        run = host.run(graph)
        assert run.error is None, run.error
        shown[name] = str(run.outputs["shown"])
    assert "ClipVisionModel" in shown["with"]
    assert "ClipVisionModel" not in shown["without"]
