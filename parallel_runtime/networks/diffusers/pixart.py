"""PixArt-α and PixArt-Σ: diffusers' PixArtTransformer2DModel as data."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from ...errors import RequestError
from .spec import IMAGE, Call, ModelSpec

_PATCH = 2
_PIXELS = 8  # of the picture along one side of a latent pixel
_BASE = 64  # side in latent pixels of the 512² pictures that positions are measured by
_FORMER = "Transformer2DModel"


def _check(call: Call) -> None:
    if any(side % _PATCH for side in call.x.shape[-2:]):
        what = "PixArt takes latents of even height and width, and got {shape} x {shape2}."
        fix = "Choose a picture size that {patch} divides."
        height, width = call.x.shape[-2:]
        raise RequestError(what, fix, shape=height, shape2=width, patch=_PATCH * _PIXELS)


def _micro_conditions(call: Call) -> dict[str, torch.Tensor] | None:
    """Size (height, width) in pixels and height over width, of the latent unless given; for PixArt-α (as SDXL's)."""
    wanted = call.config["use_additional_conditions"]
    if not (call.config["sample_size"] == 2 * _BASE if wanted is None else wanted):  # as the class takes it
        return None
    x, size, ratio = call.x, call.extras.get("c_size"), call.extras.get("c_ar")
    if size is None:
        # Filled on the GPU: numbers that come from the CPU would wait for it, at every step.
        size = torch.cat([x.new_full((1, 1), side * _PIXELS) for side in x.shape[-2:]], dim=1)
    if ratio is None:
        ratio = x.new_full((1, 1), x.shape[-2] / x.shape[-1])
    return {"resolution": call.rows("c_size", size), "aspect_ratio": call.rows("c_ar", ratio)}


def prepare(transformer: torch.nn.Module) -> None:
    """Let positions scale with the latent, as ComfyUI's forward does; diffusers scales by the config alone."""
    embedding: Any = transformer.get_submodule("pos_embed")

    def scale_positions(module: Any, inputs: tuple[torch.Tensor, ...]) -> None:
        height, width = inputs[0].shape[-2:]
        # Of a picture smaller than the smallest that PixArt was trained on, ComfyUI would divide by zero.
        module.interpolation_scale = times = max(round((height + width) // 2 / _BASE), 1)
        module.base_size = times * _BASE // _PATCH

    embedding.height = embedding.width = None  # the positions that diffusers made beforehand fit no latent
    embedding.register_forward_pre_hook(scale_positions)


_BLOCKS = replace(
    IMAGE, path="transformer_blocks", longer={"encoder_hidden_states": 1, "encoder_attention_mask": 2},
    alike=("encoder_hidden_states", "encoder_attention_mask", "timestep", "cross_attention_kwargs", "class_labels",
           "added_cond_kwargs"), whole_with=("attention_mask",),
)  # fmt: skip

PIXART = ModelSpec(
    title="PixArt",
    transformer_class="PixArtTransformer2DModel",
    cut=(_BLOCKS,),
    self_attention=("transformer_blocks.*.attn1",),
    timestep_embedder="adaln_single",
    extras=frozenset({"c_size", "c_ar"}),
    arguments={"added_cond_kwargs": _micro_conditions},
    check=_check,
    learned_sigma=True,
    former_class=_FORMER,
    # What a config.json still says that was written for the class that PixArt once shared with others.
    ignores=("double_self_attention", "num_vector_embeds", "only_cross_attention", "use_linear_projection"),
    belongs=lambda config: config["_class_name"] != _FORMER or config.get("norm_type") == "ada_norm_single",
    prepare=prepare,
    widths={"encoder_hidden_states": "caption_channels"},
)
