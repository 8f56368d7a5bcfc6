"""FLUX.1 (dev, schnell, Kontext, Fill, Canny, Depth): diffusers' FluxTransformer2DModel as data."""

from __future__ import annotations

from dataclasses import replace

import torch

from .adapter import Call
from .spec import TEXT_AND_IMAGE, ModelSpec
from .token_adapter import TokenAdapter

_USUAL_GUIDANCE = 3.5


def _pooled(call: Call) -> torch.Tensor:
    """Zeros without a pooled text."""
    pooled = call.pooled_text()
    return call.x.new_zeros(call.batch, call.config["pooled_projection_dim"]) if pooled is None else pooled


def _guidance(call: Call) -> torch.Tensor | None:
    """The usual one where none is given."""
    guidance = call.guidance()
    if guidance is None and call.config["guidance_embeds"]:
        return torch.full((call.batch,), _USUAL_GUIDANCE, device=call.x.device, dtype=torch.float32)
    return guidance


FLUX = ModelSpec(
    name="flux",
    transformer_class="FluxTransformer2DModel",
    cut=(
        TEXT_AND_IMAGE,
        replace(
            TEXT_AND_IMAGE, path="single_transformer_blocks", modulations={"temb": ("norm.linear",)}, parallel=True
        ),
    ),
    self_attention=("transformer_blocks.*.attn", "single_transformer_blocks.*.attn"),
    timestep_embedder="time_text_embed",
    timestep_scale=1000.0,
    adapter=TokenAdapter(
        "FLUX.1",
        extras=frozenset({"y", "guidance", "ref_latents"}),
        patch=2,
        axes=3,
        index_step=1,
        arguments={"pooled_projections": _pooled, "guidance": _guidance},
    ),
    widths={
        "hidden_states": "in_channels",
        "encoder_hidden_states": "joint_attention_dim",
        "pooled_projections": "pooled_projection_dim",
    },
)
