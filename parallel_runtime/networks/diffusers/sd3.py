"""SD3 and SD3.5 (medium, large, turbo): diffusers' SD3Transformer2DModel as data."""

from __future__ import annotations

import math

import torch

from ...errors import RequestError
from ...said import said
from .call import Call
from .headers import Config, Header, Recognition, Sizes, count_blocks
from .key_rules import KeyRules
from .spec import JOINT_ATTENTION, ModelSpec
from .whole_latent_adapter import WholeLatentAdapter, tokens_along

_PATCH = 2


def _check(call: Call) -> None:
    """The model has a table of positions, and a picture cannot be larger than it."""
    call.check_channels()
    places = call.config["pos_embed_max_size"]
    height, width = call.x.shape[-2:]
    if max(tokens_along(height, _PATCH), tokens_along(width, _PATCH)) > places:
        raise RequestError(
            said(
                "A latent of {height} x {width} is larger than the {places} x {places} that this {title} "
                "checkpoint has positions for.",
                height=height,
                width=width,
                places=places * _PATCH,
                title=call.title,
            ),
            "Make a smaller picture, and upscale it.",
        )


def _pooled(call: Call) -> torch.Tensor:
    pooled = call.pooled_text()
    if pooled is None:
        raise RequestError(
            said("{title} needs a pooled text beside the text tokens.", title=call.title),
            said("Encode the prompt with the text encoders of {title}.", title=call.title),
        )
    return pooled


def _further(sizes: Sizes, header: Header) -> Config | None:
    side = math.isqrt(sizes["_places"])
    if side**2 != sizes["_places"]:
        return None
    dual = "transformer_blocks.{}.attn2.to_q.weight"
    layers = range(count_blocks(header, "transformer_blocks."))
    return {
        "out_channels": sizes["_output"] // _PATCH**2,
        "caption_projection_dim": sizes["_width"],
        "pos_embed_max_size": side,
        "qk_norm": "rms_norm" if "transformer_blocks.0.attn.norm_q.weight" in header else None,
        # The first blocks of SD3.5 medium attend a second time, image tokens to image tokens.
        "dual_attention_layers": tuple(index for index in layers if dual.format(index) in header),
    }


SD3 = ModelSpec(
    name="sd3",
    title="SD3/3.5",
    transformer_class="SD3Transformer2DModel",
    self_attention=("transformer_blocks.*.attn", "transformer_blocks.*.attn2"),
    timestep_embedder="time_text_embed",
    keys=KeyRules.read("sd3"),
    recognise=Recognition(
        shapes={
            "pos_embed.proj.weight": ("_width", "in_channels", _PATCH, _PATCH),
            "pos_embed.pos_embed": (1, "_places", "_width"),
            "context_embedder.weight": ("_width", "joint_attention_dim"),
            "time_text_embed.text_embedder.linear_1.weight": ("", "pooled_projection_dim"),
            "proj_out.weight": ("_output", ""),
            "transformer_blocks.0.attn.add_q_proj.weight": ("", ""),
        },
        optional={"transformer_blocks.0.attn.norm_q.weight": ("attention_head_dim",)},
        blocks={"num_layers": "transformer_blocks"},
        published={"attention_head_dim": 64},
        # The side of the training latents: only a table of positions that a file without one would need comes from it.
        settings={"sample_size": 128, "patch_size": _PATCH},
        lookalikes=(
            "controlnet_",  # ControlNets in the same key style
            "pos_embed_input.",
            "context_processor.",  # variants of ComfyUI's MMDiT that diffusers' class has no place for
            "register",
            "double_blocks.",
            "single_transformer_blocks.",  # FLUX, AuraFlow
            "joint_transformer_blocks.",
            "image_proj.",  # IP-Adapter
        ),
        further=_further,
    ),
    adapter=WholeLatentAdapter(
        "SD3/3.5",
        extras=frozenset({"y"}),
        arguments={"pooled_projections": _pooled},
        check=_check,
        text_attends=True,
    ),
    text_layers=JOINT_ATTENTION,
    widths={"encoder_hidden_states": "joint_attention_dim", "pooled_projections": "pooled_projection_dim"},
)
