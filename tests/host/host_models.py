"""The tiny models that host tests name: FLUX.1's, or SD3's where ComfyUI opens no FLUX.1 so small."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from parallel_runtime.networks.diffusers.flux import FLUX
from parallel_runtime.networks.diffusers.sd3 import SD3
from parallel_runtime.networks.diffusers.spec import ModelSpec
from tests import tiny_flux, tiny_model, tiny_sd3

from .comfy_host import ComfyHost
from .older_host import NEWEST, read_version
from .workflow import MODEL, Workflow

_FLUX: tuple[ModelSpec, dict[str, Any]] = (FLUX, tiny_flux.tiny_config())
_SD3: tuple[ModelSpec, dict[str, Any]] = (SD3, tiny_sd3.tiny_config(pos_embed_max_size=32))
"""It takes texts and latents of the same shapes; the largest that tests ask for has 32 tokens a side."""


def write_model(
    comfy: ComfyHost, name: str, prefix: str = "", dtype: torch.dtype = torch.float32, seed: int = 0
) -> Path:
    """Write one as its authors publish it, or with a `prefix` as full checkpoints have it."""
    spec, config = _FLUX if comfy.small_flux else _SD3
    return tiny_model.write_original(spec, _folder(comfy) / name, config, prefix, dtype, seed)


def write_models(comfy: ComfyHost) -> None:
    """Write all, and tell `comfy` which they are."""
    files = _folder(comfy)
    comfy.small_flux = _opens_small_flux(comfy)
    whole = write_model(comfy, MODEL)
    write_model(comfy, "plan.safetensors", seed=3)
    write_model(comfy, "bf16.safetensors", dtype=torch.bfloat16)
    if comfy.small_flux:
        tiny_flux.write_original(files / "prefixed.safetensors", prefix="model.diffusion_model.", norm_key="weight")
        tiny_flux.write_original(files / "schnell.safetensors", config=tiny_flux.tiny_config(guidance_embeds=False))
        tiny_flux.write_original(files / "canny.safetensors", config=tiny_flux.tiny_config(in_channels=128))
    else:
        write_model(comfy, "prefixed.safetensors", prefix="model.diffusion_model.")
    spec, config = _FLUX if comfy.small_flux else _SD3
    tiny_model.write_diffusers_file(spec, files / "diffusers.safetensors", config)
    (files / "truncated.safetensors").write_bytes(whole.read_bytes()[:-1000])
    save_file({"decoder.conv_in.weight": torch.zeros(4, 4, 3, 3)}, files / "vae.safetensors")


def _folder(comfy: ComfyHost) -> Path:
    return comfy.base / "models" / "diffusion_models"


def _opens_small_flux(comfy: ComfyHost) -> bool:
    """Whether ComfyUI reads off a file how many heads its FLUX.1 has: an older one takes 24 for granted."""
    if read_version(comfy.host.path) >= NEWEST:
        return True
    tried = tiny_flux.write_original(_folder(comfy) / "tried.safetensors")
    run = comfy.run(Workflow(model=tried.name, steps=1, latent=(0, 1, 2, 2)).prompt())
    tried.unlink()
    if run.error is not None:
        assert "must be divisible by num_heads" in run.error["exception_message"], run.error
    return run.error is None
