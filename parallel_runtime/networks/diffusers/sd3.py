"""SD3 and SD3.5 (medium, large, turbo): diffusers' SD3Transformer2DModel as data."""

from __future__ import annotations

from dataclasses import replace

import torch

from ...errors import RequestError
from .spec import TEXT_AND_IMAGE, Call, ModelSpec, tokens_along

_PATCH = 2


def _check(call: Call) -> None:
    """The model has a table of positions, and a picture cannot be larger than it."""
    places = call.config["pos_embed_max_size"]
    height, width = call.x.shape[-2:]
    if max(tokens_along(height, _PATCH), tokens_along(width, _PATCH)) > places:
        what = "A latent of {height} x {width} is larger than the {places} x {places} that this {title} "
        what += "checkpoint has positions for."
        fix = "Make a smaller picture, and upscale it."
        raise RequestError(what, fix, height=height, width=width, places=places * _PATCH, title=call.title)


def _pooled(call: Call) -> torch.Tensor:
    pooled = call.pooled_text()
    if pooled is None:
        what = "{title} needs a pooled text beside the text tokens."
        raise RequestError(what, "Encode the prompt with the text encoders of {title}.", title=call.title)
    return pooled


_TOKENS = {"hidden_states": 1, "encoder_hidden_states": 1}

SD3 = ModelSpec(
    title="SD3/3.5",
    transformer_class="SD3Transformer2DModel",
    # Image tokens come first, and in some blocks of SD3.5 medium they attend to each other once more.
    cut=(replace(TEXT_AND_IMAGE, tokens=_TOKENS, joint={}, alone="hidden_states", again="attn2"),),
    self_attention=("transformer_blocks.*.attn", "transformer_blocks.*.attn2"),
    timestep_embedder="time_text_embed",
    extras=frozenset({"y"}),
    arguments={"pooled_projections": _pooled},
    check=_check,
    widths={"encoder_hidden_states": "joint_attention_dim", "pooled_projections": "pooled_projection_dim"},
)
