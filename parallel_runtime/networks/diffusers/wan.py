"""Wan 2.1, and the checkpoints of 2.2 of the same architecture: diffusers' WanTransformer3DModel as data."""

from __future__ import annotations

from dataclasses import replace

import torch

from ...errors import RequestError
from .spec import IMAGE, Call, ModelSpec, tokens_along

_LONGEST_SIDE = 1024  # tokens along one side that diffusers' rotary embedding holds
_TEXT_TOKENS = 512  # of text behind an image embedding: diffusers tells the two apart by this number


def _check(call: Call) -> None:
    frames, height, width = call.x.shape[2:]
    if max(frames, tokens_along(height, 2), tokens_along(width, 2)) > _LONGEST_SIDE:
        what = "A video latent of {value} (frames, height, width) is beyond Wan's positions in diffusers, of "
        what += "which each side has {longest_side}."
        value = (frames, height, width)
        raise RequestError(what, "Use a shorter or smaller video.", value=value, longest_side=_LONGEST_SIDE)


def _image(call: Call) -> torch.Tensor | None:
    """CLIP's view of the start image, and of the end image where the checkpoint has positions for two."""
    clip, both = call.extras.get("clip_fea"), call.config.get("pos_embed_seq_len")
    if call.config.get("image_dim") is None:
        if clip is None:
            return None
        what = "The conditioning holds clip_fea, and this Wan checkpoint has no image embedder to take it in."
        raise RequestError(what, "Leave it out, or choose a checkpoint made for it.")
    if clip is not None and call.context.shape[1] != _TEXT_TOKENS:
        what = "diffusers' Wan takes prompts of {text_tokens} tokens with an image, and got {shape}."
        fix = "Fill the prompt up, or cut it."
        raise RequestError(what, fix, text_tokens=_TEXT_TOKENS, shape=call.context.shape[1])
    shape = () if clip is None else tuple(clip.shape)
    if clip is None or len(shape) != 3 or shape[0] not in (1, call.batch) or shape[1] != (both or shape[1]):
        what = "In diffusers this Wan checkpoint takes CLIP vision's view of {wanted}, and got {shape}."
        wanted = "a start image" if both is None else "a start and an end image"
        raise RequestError(what, "Give clip_fea, as the model was made for.", wanted=wanted, shape=shape or "none")
    clip = clip.to(call.x).expand(call.batch, -1, -1)
    # diffusers puts the two images side by side itself, out of a batch twice as large.
    return clip if both is None else clip.reshape(2 * call.batch, both // 2, -1)


WAN = ModelSpec(
    title="Wan",
    transformer_class="WanTransformer3DModel",
    cut=(replace(IMAGE, joint={"rotary_emb": 1}),),
    self_attention=("blocks.*.attn1",),
    timestep_embedder="condition_embedder",
    extras=frozenset({"clip_fea"}),
    arguments={"encoder_hidden_states_image": _image},
    check=_check,
    frames=True,
    widths={"encoder_hidden_states": "text_dim", "encoder_hidden_states_image": "image_dim"},
)
