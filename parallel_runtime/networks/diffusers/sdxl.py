"""SDXL (base, refiner, inpainting, and the smaller SSD-1B, Vega and KOALA): diffusers' UNet2DConditionModel as data.

A U-Net: its resolutions are joined by convolutions, which need their neighbours, so no rank takes a share of the
tokens. Ranks share out the rows of a batch, CFG branches and pictures, and each has the whole model.
"""

from __future__ import annotations

import torch

from ...errors import RequestError
from ...said import said
from .call import Call
from .headers import Config, Header, Recognition, Sizes
from .key_rules import KeyRules
from .spec import ModelSpec
from .unet_keys import UNetKeys, UNetLayers
from .whole_latent_adapter import WholeLatentAdapter

_HEAD_DIM = 64
"""No tensor's shape tells it; all published ones have it, and ComfyUI takes no other."""


def _further(sizes: Sizes, header: Header) -> Config | None:
    """The config of a U-Net by where its layers are; None where it is not of SDXL's kind."""
    layers = UNetLayers.read(header)
    # SDXL has no attention at the highest resolution. Stable Diffusion 1 and 2 and their relatives do.
    if layers is None or any(layers.down[0]) or any(any(level) != all(level) for level in (*layers.down, *layers.up)):
        return None
    attends = [any(level) for level in layers.down]
    first = f"down_blocks.{attends.index(True)}.attentions.0." if any(attends) else ""
    shapes = [
        header[name].shape if name in header else ()
        for name in (
            *(f"down_blocks.{level}.resnets.0.conv2.weight" for level in range(len(attends))),
            f"{first}transformer_blocks.0.attn2.to_k.weight",
            f"{first}proj_in.weight",
        )
    ]
    if attends != [any(level) for level in layers.up][::-1] or [len(shape) for shape in shapes[-2:]] != [2, 2]:
        return None
    channels = tuple(shape[0] if shape else 0 for shape in shapes[:-2])
    if any(width < 1 or (attending and width % _HEAD_DIM) for width, attending in zip(channels, attends, strict=True)):
        return None
    return {
        "block_out_channels": channels,
        "attention_head_dim": tuple(max(1, width // _HEAD_DIM) for width in channels),
        "cross_attention_dim": shapes[-2][1],
        **layers.config(),
    }


def _width(config: Config) -> int:
    """Of the first transformer block: that of the highest resolution with attention, or of the middle."""
    levels = zip(config["down_block_types"], config["block_out_channels"], strict=True)
    return next((width for kind, width in levels if kind == "CrossAttnDownBlock2D"), config["block_out_channels"][-1])


def _micro_conditions(call: Call) -> dict[str, torch.Tensor]:
    """The pooled text and behind it the sinusoids of sizes and crop (arXiv 2307.01952): both are in y."""
    y, width = call.pooled_text(), call.config["projection_class_embeddings_input_dim"]
    if y is None or y.shape[-1] != width:
        raise RequestError(
            said(
                "{title} takes a pooled text with sizes of width {width} in this checkpoint, and got {shape}.",
                title=call.title,
                width=width,
                shape="none" if y is None else f"one of width {y.shape[-1]}",
            ),
            said("Encode the prompt with the text encoders of {title}.", title=call.title),
        )
    # diffusers puts the sinusoids of `time_ids` behind `text_embeds`: of no numbers come no more.
    return {"text_embeds": y, "time_ids": y.new_empty((call.batch, 0))}


SDXL = ModelSpec(
    name="sdxl",
    title="SDXL",
    transformer_class="UNet2DConditionModel",
    shares_class=True,
    block_lists=tuple(
        f"{part}.attentions.*.transformer_blocks" for part in ("down_blocks.*", "mid_block", "up_blocks.*")
    ),
    self_attention=(),
    heads=lambda config: 1,  # heads stay together on one rank
    width=_width,
    timestep_embedder="time_proj",
    keys=UNetKeys(KeyRules.read("sdxl")),
    recognise=Recognition(
        shapes={
            "conv_in.weight": ("", "in_channels", "", ""),
            "add_embedding.linear_1.weight": ("", "projection_class_embeddings_input_dim"),
            "conv_out.weight": ("out_channels", "", "", ""),
        },
        settings={
            "sample_size": 128,
            "use_linear_projection": True,
            "addition_embed_type": "text_time",
            "addition_time_embed_dim": 256,
        },
        # ControlNets in either style; Kolors; a range of noise in tensors, which the loader does not read.
        lookalikes=("controlnet_", "input_hint_block.", "encoder_hid_proj.", "edm_vpred."),
        further=_further,
    ),
    adapter=WholeLatentAdapter(
        "SDXL",
        extras=frozenset({"y"}),
        arguments={"added_cond_kwargs": _micro_conditions},
        latent="sample",
        patch=1,
        tokens_every=4,  # most of the transformer blocks are at a quarter of the resolution
    ),
    widths={"encoder_hidden_states": "cross_attention_dim"},
)
