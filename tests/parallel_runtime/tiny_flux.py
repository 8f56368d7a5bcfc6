"""A FLUX transformer of a few hundred thousand parameters, and inputs for it, made from seeds."""

from __future__ import annotations

from typing import Any

import torch
from diffusers import FluxTransformer2DModel

from parallel_runtime.models.flux import FLUX


def tiny_flux(heads: int = 4, layers: int = 1, single_layers: int = 1, guidance: bool = True, seed: int = 0) -> Any:
    """Random weights in float32, the same in every process."""
    torch.manual_seed(seed)
    model = FluxTransformer2DModel(
        in_channels=16,
        num_layers=layers,
        num_single_layers=single_layers,
        attention_head_dim=32,
        num_attention_heads=heads,
        joint_attention_dim=24,
        pooled_projection_dim=20,
        guidance_embeds=guidance,
        axes_dims_rope=(8, 12, 12),
    )
    return model.requires_grad_(False).eval()


def flux_inputs(
    rows: int, columns: int, text: int, batch: int = 1, guidance: bool = True, dtype: torch.dtype = torch.float32
) -> dict[str, Any]:
    """Keyword arguments of one forward: rows × columns image tokens, `text` text tokens."""
    generator = torch.Generator().manual_seed(1000 * rows + 100 * columns + 10 * text + batch)
    image = rows * columns
    ids = torch.zeros(rows, columns, 3)
    ids[..., 1] = torch.arange(rows)[:, None]
    ids[..., 2] = torch.arange(columns)[None, :]
    inputs = {
        "hidden_states": torch.randn(batch, image, 16, generator=generator).to(dtype),
        "encoder_hidden_states": torch.randn(batch, text, 24, generator=generator).to(dtype),
        "pooled_projections": torch.randn(batch, 20, generator=generator).to(dtype),
        "timestep": torch.rand(batch, generator=generator),
        "img_ids": ids.reshape(image, 3),
        "txt_ids": torch.zeros(text, 3),
        "return_dict": False,
    }
    if guidance:
        inputs["guidance"] = torch.full((batch,), 3.5)
    return inputs


__all__ = ["FLUX", "flux_inputs", "tiny_flux"]
