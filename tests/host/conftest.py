"""The session's ComfyUI."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from tests.tiny_flux import tiny_config, write_diffusers_file, write_diffusers_folder, write_original

from .find_host import NoHost, find_host
from .workflow import MODEL


@pytest.fixture(scope="session")
def host(tmp_path_factory: pytest.TempPathFactory) -> Iterator:
    """A running ComfyUI with the pack, the test pack and tiny models; skipped where there is no ComfyUI."""
    pytest.importorskip("websocket", reason="host tests need the package websocket-client")
    from .comfy_host import ComfyHost

    try:
        found = find_host()
        comfy = ComfyHost(found, tmp_path_factory.mktemp("comfyui") / "base")
    except NoHost as missing:
        pytest.skip(f"host tests: {missing}")
    try:
        _write_models(comfy.base / "models")
        yield comfy
    finally:
        comfy.stop()


def _write_models(models: Path) -> None:
    files = models / "diffusion_models"
    whole = write_original(files / MODEL)
    write_original(files / "prefixed.safetensors", prefix="model.diffusion_model.", norm_key="weight")
    write_original(files / "plan.safetensors", seed=3)
    write_original(files / "bf16.safetensors", dtype=torch.bfloat16)
    write_original(files / "schnell.safetensors", config=tiny_config(guidance_embeds=False))
    write_original(files / "canny.safetensors", config=tiny_config(in_channels=128))
    write_diffusers_file(files / "diffusers.safetensors")
    write_diffusers_folder(models / "diffusers" / "tiny-pipeline", pipeline=True)
    (files / "truncated.safetensors").write_bytes(whole.read_bytes()[:-1000])
    save_file({"decoder.conv_in.weight": torch.zeros(4, 4, 3, 3)}, files / "vae.safetensors")
