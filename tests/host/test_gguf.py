"""GGUF files in a real ComfyUI with the pack ComfyUI-GGUF: the latents of that pack's own loader."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch

from tests.tiny_lora import FLUX, write_lora

from .small_files import GGUF_TYPES
from .test_lora import Lora, with_loras
from .workflow import SAVE, Prompt, Workflow

pytestmark = pytest.mark.host

TOLERANCE = 1e-4
"""Of the latent's scale."""
BASE = Workflow(steps=2, cfg=4.0, lengths=(9, 5))


@pytest.fixture(scope="module")
def files(host, gguf) -> Iterator[None]:
    """A model in GGUF's types, and a LoRA."""
    lora = host.base / "models" / "loras" / "gguf.safetensors"
    lora.parent.mkdir(exist_ok=True)
    write_lora(lora, FLUX)
    yield
    lora.unlink()


def latent(host, prompt: Prompt) -> torch.Tensor:
    return host.latent(host.run(prompt), SAVE)


def assert_same(ours: torch.Tensor, wanted: torch.Tensor) -> None:
    assert wanted.std() > 0.1
    assert (ours - wanted).abs().max() < TOLERANCE * wanted.abs().max()


@pytest.mark.long_but_for("Q4_0", "BF16")
@pytest.mark.slow
@pytest.mark.parametrize("name", GGUF_TYPES)
def test_a_gguf_file_gives_what_the_packs_own_loader_gives(host, files, name):
    workflow = replace(BASE, model=f"{name}.gguf")
    wanted = latent(host, workflow.prompt())
    for devices in ("cpu:1", "cpu:2"):
        run = host.run(workflow.on(devices).prompt())
        assert_same(host.latent(run, SAVE), wanted)


@pytest.mark.long_but_for("Q8_0")
@pytest.mark.slow
@pytest.mark.parametrize("name", ["Q8_0", "F16"])
def test_a_lora_comes_and_goes_beside_quantised_weights(host, files, name):
    workflow = replace(BASE, model=f"{name}.gguf", steps=1)
    sets = [(), (Lora("gguf", 0.8),), (Lora("gguf", -0.5), Lora("gguf", 0.3)), ()]
    ours = [latent(host, with_loras(workflow.on("cpu:2").prompt(), *loras)) for loras in sets]
    for loras, given in zip(sets[1:3], ours[1:3], strict=True):
        assert_same(given, latent(host, with_loras(workflow.prompt(), *loras)))
    assert (ours[1] - ours[0]).abs().max() > 10 * TOLERANCE * ours[0].abs().max()
    assert torch.equal(ours[3], ours[0])


def test_a_damaged_gguf_file_is_refused_before_the_pack_reads_it(host, files):
    folder = host.base / "models" / "diffusion_models"
    (folder / "broken.gguf").write_bytes((folder / "Q8_0.gguf").read_bytes()[:5000])
    try:
        run = host.run(replace(BASE, model="broken.gguf").on("cpu:2").prompt())
    finally:
        (folder / "broken.gguf").unlink()
    assert run.error is not None
    assert "has a damaged header (the file ends in it)" in run.error["exception_message"]
