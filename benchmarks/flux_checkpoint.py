"""A FLUX.1-dev size checkpoint with random bf16 weights, in the layout that artists have. About 24 GB."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from parallel_runtime.networks.diffusers.flux import FLUX

FLUX_DEV: dict[str, Any] = {
    "patch_size": 1,
    "in_channels": 64,
    "out_channels": 64,
    "num_layers": 19,
    "num_single_layers": 38,
    "attention_head_dim": 128,
    "num_attention_heads": 24,
    "joint_attention_dim": 4096,
    "pooled_projection_dim": 768,
    "guidance_embeds": True,
    "axes_dims_rope": (16, 56, 56),
}


def write_random_flux(path: Path, config: dict[str, Any] = FLUX_DEV, seed: int = 0) -> None:
    """Write a checkpoint whose weights have the spread of freshly initialised ones: outputs stay finite.

    The shapes come from the diffusers class on the meta device, the names from the model's own weight rules.
    """
    import diffusers

    device = "cuda" if torch.cuda.is_available() else "cpu"
    with torch.device("meta"):
        transformer: Any = diffusers.FluxTransformer2DModel(**config)
    shapes = {name: tensor.shape for name, tensor in transformer.state_dict().items()}
    generator = torch.Generator(device).manual_seed(seed)
    parts: dict[str, list[tuple[int, torch.Tensor]]] = {}
    for rule in FLUX.keys.weight_rules(shapes):
        shape = shapes[rule.target]
        spread = 0.02 if len(shape) > 1 else 0.01
        values = torch.randn(shape, generator=generator, device=device).mul_(spread)
        if len(shape) == 1 and "norm" in rule.target and rule.target.endswith("weight"):
            values += 1
        parts.setdefault(rule.source, []).append((rule.rows[0] if rule.rows else 0, values.bfloat16().cpu()))
    whole = {}
    for source, pieces in parts.items():
        pieces.sort(key=lambda piece: piece[0])
        whole[source] = torch.cat([rows for _, rows in pieces])
    save_file(whole, path)
