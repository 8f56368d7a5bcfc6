"""FLUX.2 (dev, klein): diffusers' Flux2Transformer2DModel as data."""

from __future__ import annotations

import torch

from .call import Call
from .headers import Config, Header, Recognition, Sizes
from .key_rules import KeyRules
from .spec import JOINT_ATTENTION, ModelSpec
from .token_adapter import TokenAdapter, TokenLayout

_AXES = 4


def _guidance(call: Call) -> torch.Tensor | None:
    """Without guidance its embedding is left out."""
    guidance = call.extras.get("guidance") if call.config["guidance_embeds"] else None
    return None if guidance is None else call.per_item("guidance", guidance.to(call.x.device))


def _text_ids(call: Call) -> torch.Tensor:
    """A text token's place is its number, on the last axis."""
    ids = torch.zeros(call.context.shape[1], _AXES, device=call.x.device, dtype=torch.float32)
    ids[:, -1] = torch.arange(call.context.shape[1], device=call.x.device)
    return ids


def _further(sizes: Sizes, header: Header) -> Config | None:
    """What tells FLUX.2 from its relatives: modulations that all blocks share, of a scale, a shift and a gate twice."""
    if sizes["_modulation"] != 6 * sizes["_width"]:
        return None
    return {"mlp_ratio": sizes["_mlp"] / sizes["_width"]}


FLUX2 = ModelSpec(
    name="flux2",
    title="FLUX.2",
    transformer_class="Flux2Transformer2DModel",
    block_lists=("transformer_blocks", "single_transformer_blocks"),
    self_attention=("transformer_blocks.*.attn", "single_transformer_blocks.*.attn"),
    # The bare sinusoid: the embedder around it casts what it gets to the timestep's dtype, which must be the model's.
    timestep_embedder="time_guidance_embed.time_proj",
    timestep_scale=1000.0,
    keys=KeyRules.read("flux2"),
    recognise=Recognition(
        shapes={
            "x_embedder.weight": ("_width", "in_channels"),
            "context_embedder.weight": ("", "joint_attention_dim"),
            "proj_out.weight": ("out_channels", ""),
            "time_guidance_embed.timestep_embedder.linear_1.weight": ("", "timestep_guidance_channels"),
            "double_stream_modulation_img.linear.weight": ("_modulation", "_width"),
            "transformer_blocks.0.ff.linear_out.weight": ("", "_mlp"),
            "transformer_blocks.0.attn.norm_q.weight": ("attention_head_dim",),
        },
        blocks={"num_layers": "transformer_blocks", "num_single_layers": "single_transformer_blocks"},
        present={"guidance_embeds": "time_guidance_embed.guidance_embedder.linear_1.weight"},
        # How the rotary dims of a head divide over (index, row, column, place in the text). No tensor's shape tells,
        # so only the published head dim is taken; ComfyUI does the same.
        published={"attention_head_dim": 128},
        settings={"patch_size": 1, "axes_dims_rope": (32, 32, 32, 32), "rope_theta": 2000, "eps": 1e-6},
        # Keys that relatives in the same key style have and FLUX.2 has not.
        lookalikes=("distilled_guidance_layer.", "vector_in.", "txt_norm.", "controlnet_", "emb_in."),
        further=_further,
    ),
    adapter=TokenAdapter(
        "FLUX.2",
        # `y` has no effect, as in ComfyUI: conditionings of other text encoders carry one.
        extras=frozenset({"y", "guidance", "ref_latents", "ref_latents_method"}),
        layout=TokenLayout(patch=1, axes=_AXES, index_step=10, reference_method="index"),
        arguments={"guidance": _guidance, "txt_ids": _text_ids},
    ),
    text_layers=JOINT_ATTENTION,
    token=1,
    widths={"hidden_states": "in_channels", "encoder_hidden_states": "joint_attention_dim"},
)
