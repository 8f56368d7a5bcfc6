"""The model that has learned to draw emoji (benchmarks/emoji), where a ComfyUI finds it."""

from __future__ import annotations

import shutil
from pathlib import Path

from safetensors.torch import load_file, save_file

from .find_host import PACK_ROOT

MODEL = PACK_ROOT / "benchmarks" / "emoji" / "model"
FLUX, VAE = "emoji-flux.safetensors", "emoji-vae.safetensors"


def write_emoji_model(base: Path) -> str:
    """Put the model, its VAE and the decoder of previews under a ComfyUI's base directory; return the model's file."""
    folders = {name: base / "models" / name for name in ("diffusion_models", "vae", "vae_approx")}
    for folder in folders.values():
        folder.mkdir(parents=True, exist_ok=True)
    shutil.copy(MODEL / "emoji-flux" / "diffusion_pytorch_model.safetensors", folders["diffusion_models"] / FLUX)
    shutil.copy(MODEL / VAE, folders["vae"] / VAE)
    decoder = {name.removeprefix("taesd_decoder."): part for name, part in load_file(MODEL / VAE).items()}
    save_file(
        {name: part for name, part in decoder.items() if name[0].isdigit()},
        folders["vae_approx"] / "taef1_decoder.safetensors",
    )
    return FLUX
