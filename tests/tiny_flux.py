"""Makes tiny FLUX.1 checkpoints with random weights in the file formats that artists have (tiny_model.py).

For tests and the demo.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from parallel_runtime.networks.diffusers.flux import FLUX

from . import tiny_model
from .authors_names import to_authors


def tiny_config(**changes: Any) -> dict[str, Any]:
    """Arguments of FluxTransformer2DModel for a few million parameters: 4 heads of 128, as ComfyUI fixes the head dim.

    Schnell is `guidance_embeds=False`; Fill `in_channels=384`, Canny and Depth `in_channels=128`.
    """
    return {
        "patch_size": 1,
        "in_channels": 64,
        "out_channels": 64,
        "num_layers": 2,
        "num_single_layers": 2,
        "attention_head_dim": 128,
        "num_attention_heads": 4,
        "joint_attention_dim": 64,
        "pooled_projection_dim": 32,
        "guidance_embeds": True,
        "axes_dims_rope": (16, 56, 56),
        **changes,
    }


def make_state_dict(
    config: Mapping[str, Any], dtype: torch.dtype = torch.float32, seed: int = 0
) -> dict[str, torch.Tensor]:
    """Random diffusers state dict."""
    return tiny_model.make_state_dict(FLUX, config, dtype, seed)


def to_original(state_dict: Mapping[str, torch.Tensor], norm_key: str = "scale") -> dict[str, torch.Tensor]:
    """The same weights under Black Forest Labs' names; `norm_key="weight"` spells the norms as ComfyUI saves them."""
    original = to_authors("flux", state_dict)
    return {key.replace("_norm.scale", f"_norm.{norm_key}"): tensor for key, tensor in original.items()}


def write_original(
    path: Path,
    config: Mapping[str, Any] | None = None,
    prefix: str = "",
    norm_key: str = "scale",
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
) -> Path:
    """Write a single file as Black Forest Labs publish it, or with a `prefix` as full checkpoints have it."""
    config = config or tiny_config()
    original = to_original(make_state_dict(config, dtype, seed), norm_key)
    save_file({prefix + key: tensor for key, tensor in original.items()}, path, metadata=tiny_model.METADATA)
    return path


def write_diffusers_folder(
    path: Path,
    config: Mapping[str, Any] | None = None,
    shards: int = 1,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
    pipeline: bool = False,
) -> Path:
    """Write a diffusers transformer folder; `pipeline` puts it into a FluxPipeline folder. Returns `path`."""
    named = "FluxPipeline" if pipeline else ""
    return tiny_model.write_diffusers_folder(FLUX, path, config or tiny_config(), shards, dtype, seed, named)


def weights_file(folder: Path) -> Path:
    """The one safetensors file of a folder that `write_diffusers_folder` made."""
    return folder / "diffusion_pytorch_model.safetensors"
