"""SDXL (base, refiner, inpainting, and the smaller SSD-1B, Vega and KOALA): diffusers' UNet2DConditionModel as data.

A U-Net: its resolutions are joined by convolutions, which need their neighbours, so no rank takes a share of the
tokens. Ranks share out the rows of a batch, CFG branches and pictures, and each has the whole model."""

from __future__ import annotations

import torch

from ...errors import RequestError
from .spec import Call, ModelSpec


def _micro_conditions(call: Call) -> dict[str, torch.Tensor]:
    """The pooled text and behind it the sinusoids of sizes and crop (arXiv 2307.01952): both are in y."""
    y, width = call.pooled_text(), call.config["projection_class_embeddings_input_dim"]
    if y is None or y.shape[-1] != width:
        what = "{title} takes a pooled text with sizes of width {width} in this checkpoint, and got {shape}."
        fix = "Encode the prompt with the text encoders of {title}."
        shape = "none" if y is None else f"one of width {y.shape[-1]}"
        raise RequestError(what, fix, title=call.title, width=width, shape=shape)
    # diffusers puts the sinusoids of `time_ids` behind `text_embeds`: of no numbers come no more.
    return {"text_embeds": y, "time_ids": y.new_empty((call.batch, 0))}


SDXL = ModelSpec(
    title="SDXL",
    transformer_class="UNet2DConditionModel",
    # Stable Diffusion 1 and 2 have no sizes beside the text; Kolors has another width of text.
    belongs=lambda config: config.get("addition_embed_type") == "text_time" and not config.get("encoder_hid_dim"),
    whole=tuple(f"{part}.attentions.*.transformer_blocks" for part in ("down_blocks.*", "mid_block", "up_blocks.*")),
    self_attention=(),
    token=4,  # most of the transformer blocks are at a quarter of the resolution
    timestep_embedder="time_proj",
    extras=frozenset({"y"}),
    arguments={"added_cond_kwargs": _micro_conditions},
    latent="sample",
    patch=1,
    widths={"encoder_hidden_states": "cross_attention_dim"},
)
