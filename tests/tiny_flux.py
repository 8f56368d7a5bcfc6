"""Makes tiny FLUX.1 checkpoints with random weights in the file formats that artists have.

For tests and the demo. The same seed and config give the same weights in every layout.
"""

from __future__ import annotations

import json
import math
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from parallel_runtime.models.flux import FLUX


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
    """Random diffusers state dict: every matrix keeps its input's scale, norms are near one, nothing is zero."""
    from diffusers import FluxTransformer2DModel  # here, because the import takes seconds

    with torch.device("meta"):
        transformer: Any = FluxTransformer2DModel(**config)
    shapes = {name: tensor.shape for name, tensor in transformer.state_dict().items()}
    return {name: _random(name, shape, seed).to(dtype) for name, shape in shapes.items()}


def _random(name: str, shape: torch.Size, seed: int) -> torch.Tensor:
    # A generator per tensor, so that a weight depends on its name and the seed only.
    generator = torch.Generator().manual_seed(zlib.crc32(f"{seed}/{name}".encode()))
    noise = torch.randn(shape, generator=generator)
    if len(shape) > 1:
        return noise / math.sqrt(shape[-1])
    return 1 + 0.1 * noise if ".norm_" in name else 0.02 * noise


def to_original(
    state_dict: Mapping[str, torch.Tensor], config: Mapping[str, Any], norm_key: str = "scale"
) -> dict[str, torch.Tensor]:
    """The same weights under Black Forest Labs' names; `norm_key="weight"` spells the norms as ComfyUI saves them."""
    parts: dict[str, list[tuple[int, torch.Tensor]]] = {}
    for rule in FLUX.weight_rules(config):
        tensor = state_dict[rule.target]
        tensor = torch.cat(tensor.chunk(2)[::-1]) if rule.swap_halves else tensor
        parts.setdefault(rule.source, []).append((rule.rows[0] if rule.rows else 0, tensor))
    original = {
        key: torch.cat([tensor for _, tensor in sorted(rows, key=lambda part: part[0])]) for key, rows in parts.items()
    }
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
    original = to_original(make_state_dict(config, dtype, seed), config, norm_key)
    save_file({prefix + key: tensor for key, tensor in original.items()}, path, metadata={"format": "pt"})
    return path


def write_diffusers_file(
    path: Path, config: Mapping[str, Any] | None = None, dtype: torch.dtype = torch.float32, seed: int = 0
) -> Path:
    """Write a single file with diffusers' names, without a config.json."""
    save_file(make_state_dict(config or tiny_config(), dtype, seed), path, metadata={"format": "pt"})
    return path


def write_diffusers_folder(
    path: Path,
    config: Mapping[str, Any] | None = None,
    shards: int = 1,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
    pipeline: bool = False,
) -> Path:
    """Write a diffusers transformer folder, in several files if asked; `pipeline` puts it into a FluxPipeline folder.

    Returns:
        `path`.
    """
    config = config or tiny_config()
    folder = path / "transformer" if pipeline else path
    folder.mkdir(parents=True)
    if pipeline:
        index = {"_class_name": "FluxPipeline", "transformer": ["diffusers", "FluxTransformer2DModel"]}
        (path / "model_index.json").write_text(json.dumps(index))
    written = {"_class_name": "FluxTransformer2DModel", "_diffusers_version": "0.30.0", **config}
    (folder / "config.json").write_text(json.dumps(written))
    state_dict = make_state_dict(config, dtype, seed)
    if shards == 1:
        save_file(state_dict, folder / "diffusion_pytorch_model.safetensors", metadata={"format": "pt"})
        return path
    weight_map = {}
    for number in range(shards):
        name = f"diffusion_pytorch_model-{number + 1:05d}-of-{shards:05d}.safetensors"
        part = dict(list(state_dict.items())[number::shards])
        save_file(part, folder / name, metadata={"format": "pt"})
        weight_map.update(dict.fromkeys(part, name))
    index_file = folder / "diffusion_pytorch_model.safetensors.index.json"
    index_file.write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return path
