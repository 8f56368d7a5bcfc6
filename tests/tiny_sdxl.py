"""Tiny SDXL U-Nets: configs for tiny_model.py, and the tensors of ComfyUI's call."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch

from parallel_runtime.networks.diffusers.sdxl import SDXL
from tests.tiny_model import write_diffusers_folder, write_original

DOWN, ATTENDING_DOWN = "DownBlock2D", "CrossAttnDownBlock2D"
UP, ATTENDING_UP = "UpBlock2D", "CrossAttnUpBlock2D"


def tiny_config(**changes: Any) -> dict[str, Any]:
    """Arguments of UNet2DConditionModel for a few million parameters, in the form of SDXL base."""
    return {
        "sample_size": 128,
        "in_channels": 4,
        "out_channels": 4,
        "block_out_channels": (32, 64, 128),
        "down_block_types": (DOWN, ATTENDING_DOWN, ATTENDING_DOWN),
        "mid_block_type": "UNetMidBlock2DCrossAttn",
        "up_block_types": (ATTENDING_UP, ATTENDING_UP, UP),
        "layers_per_block": 2,
        "transformer_layers_per_block": (1, 1, 2),
        "reverse_transformer_layers_per_block": None,
        "attention_head_dim": (1, 1, 2),  # diffusers' name for the number of heads
        "cross_attention_dim": 48,
        "use_linear_projection": True,
        "addition_embed_type": "text_time",
        "addition_time_embed_dim": 256,
        "projection_class_embeddings_input_dim": 96,
        **changes,
    }


KINDS: dict[str, dict[str, Any]] = {
    "base": tiny_config(),
    "inpainting": tiny_config(in_channels=9),
    "refiner": tiny_config(
        block_out_channels=(32, 64, 128, 128),
        attention_head_dim=(1, 1, 2, 2),
        down_block_types=(DOWN, ATTENDING_DOWN, ATTENDING_DOWN, DOWN),
        up_block_types=(UP, ATTENDING_UP, ATTENDING_UP, UP),
        transformer_layers_per_block=(1, 1, 1, 1),
    ),
    "SSD-1B": tiny_config(
        mid_block_type="UNetMidBlock2D", reverse_transformer_layers_per_block=((2, 2, 3), (2, 1, 1), 1)
    ),
    "KOALA": tiny_config(mid_block_type=None, layers_per_block=1),
}


def recognised_config() -> dict[str, Any]:
    """The smallest one that ComfyUI recognises: KOALA's depths, and everywhere the width of the highest resolution."""
    return tiny_config(
        block_out_channels=(320, 320, 320),
        attention_head_dim=(5, 5, 5),
        mid_block_type=None,
        layers_per_block=1,
        transformer_layers_per_block=(1, 2, 5),
        reverse_transformer_layers_per_block=(1, 1, 1),
        cross_attention_dim=2048,
        projection_class_embeddings_input_dim=2816,
    )


def make_call(
    seed: int, size: tuple[int, int], batch: int = 1, text: int = 5, channels: int = 4, width: int = 48
) -> dict[str, torch.Tensor]:
    """Arguments of one call of ComfyUI's."""
    generator = torch.Generator().manual_seed(seed)
    return {
        "x": torch.randn(batch, channels, *size, generator=generator),
        "timestep": torch.tensor([904.0, 31.25, 500.0])[:batch],
        "context": torch.randn(batch, text, width, generator=generator),
        "y": torch.randn(batch, 96, generator=generator),
    }


def write_pipeline(path: Path, config: dict[str, Any]) -> Path:
    """Write a diffusers folder as published: the U-Net in `unet`, with a config of more fields, some of them null."""
    write_diffusers_folder(SDXL, path, config, pipeline="StableDiffusionXLPipeline")
    folder = (path / "transformer").rename(path / "unet")
    written = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**written, "upcast_attention": None, "act_fn": "silu"}))
    return path


if __name__ == "__main__":
    *_, folder, name = sys.argv
    write_original(SDXL, Path(folder) / f"{name}.safetensors", recognised_config())
