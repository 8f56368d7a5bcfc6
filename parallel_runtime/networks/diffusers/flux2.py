"""FLUX.2 (dev, klein): diffusers' Flux2Transformer2DModel as data."""

from __future__ import annotations

from dataclasses import replace

import torch
import torch.nn.functional as F

from ..tables.blocks import Blocks
from .adapter import Call
from .spec import TEXT_AND_IMAGE, ModelSpec
from .token_adapter import TokenAdapter

_AXES = 4


def _text_ids(call: Call) -> torch.Tensor:
    """A text token's place is its number, on the last axis."""
    places = torch.arange(call.context.shape[1], device=call.x.device, dtype=torch.float32)
    return F.pad(places[:, None], (_AXES - 1, 0))


FLUX2 = ModelSpec(
    name="flux2",
    transformer_class="Flux2Transformer2DModel",
    cut=(
        replace(TEXT_AND_IMAGE, alike=("temb_mod_img", "temb_mod_txt", "joint_attention_kwargs"), modulations={}),
        Blocks(
            "single_transformer_blocks",
            {"hidden_states": 1},
            ("hidden_states",),
            joint={"image_rotary_emb": 0},
            alike=("temb_mod", "joint_attention_kwargs", "split_hidden_states"),
            whole_with=("encoder_hidden_states", "text_seq_len"),
            latent="hidden_states",
        ),
    ),
    self_attention=("transformer_blocks.*.attn", "single_transformer_blocks.*.attn"),
    # The bare sinusoid: the embedder around it casts what it gets to the timestep's dtype, which must be the model's.
    timestep_embedder="time_guidance_embed.time_proj",
    timestep_scale=1000.0,
    adapter=TokenAdapter(
        "FLUX.2",
        extras=frozenset({"guidance", "ref_latents"}),
        patch=1,
        axes=_AXES,
        index_step=10,
        arguments={"guidance": Call.guidance, "txt_ids": _text_ids},
    ),
    token=1,
    widths={"hidden_states": "in_channels", "encoder_hidden_states": "joint_attention_dim"},
)
