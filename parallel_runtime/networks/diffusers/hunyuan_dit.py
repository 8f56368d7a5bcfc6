"""HunyuanDiT (1.0, 1.1, 1.2): diffusers' HunyuanDiT2DModel as data; it predicts the velocity (not that of a flow)."""

from __future__ import annotations

from dataclasses import replace

import torch

from ...errors import RequestError
from .spec import IMAGE, Call, ModelSpec, tokens_along

_BASE = 32  # tokens along one side of the 512² pictures that positions are measured by
_THETA = 10000.0


def rotary_embedding(call: Call) -> tuple[torch.Tensor, ...]:
    """Cosine and sine, (tokens, head_dim) float32: a token's column in the first half of the dims, its row behind."""
    rows, columns = (tokens_along(side, call.config["patch_size"]) for side in call.x.shape[-2:])
    dim = call.config["attention_head_dim"] // 2
    across, down = (_angles(count, max(rows, columns), dim, call.x.device) for count in (columns, rows))
    grid = torch.cat([across.expand(rows, -1, -1), down[:, None].expand(-1, columns, -1)], dim=-1).flatten(0, 1)
    return grid.cos(), grid.sin()


def _angles(count: int, longest: int, dim: int, device: torch.device) -> torch.Tensor:
    """(count, dim): angles of evenly spaced positions, each twice (float32; positions are exact to float64)."""
    side = round(_BASE / longest * count)
    places = torch.arange(count, device=device, dtype=torch.float64) * (side / count) + round((_BASE - side) / 2)
    frequencies = _THETA ** -(torch.arange(0, dim, 2, device=device, dtype=torch.float32) / dim)
    return torch.outer(places.float(), frequencies).repeat_interleave(2, dim=1)


def _text_and_mask(call: Call, text: torch.Tensor | None, name: str, trained: str) -> tuple[torch.Tensor, torch.Tensor]:
    """One encoder's text (B, tokens, width) and the mask of that name (B, tokens): True where the text stays, False
    where the learned padding goes, which has `trained` (a name in the config) tokens."""
    mask, length = call.extras.get(name), call.config[trained]
    if text is None or mask is None or text.ndim != 3 or mask.shape[1:] != text.shape[1:2]:
        shapes = [None if value is None else tuple(value.shape) for value in (text, mask)]
        what = "{title} takes the texts of two encoders with their masks, and got {shapes} and {shapes2}."
        fix = "Encode the prompt with HunyuanDiT's text encoders."
        raise RequestError(what, fix, title=call.title, shapes=shapes[0], shapes2=shapes[1])
    if text.shape[1] != length:
        what = "{title} takes texts of {length} tokens, and got {shape}."
        raise RequestError(what, "Fill the text up, or cut it.", title=call.title, length=length, shape=text.shape[1])
    return call.rows("text", text), call.rows("text mask", mask).bool()


def _clip(call: Call) -> tuple[torch.Tensor, torch.Tensor]:
    return _text_and_mask(call, call.context, "text_embedding_mask", "text_len")


def _t5(call: Call) -> tuple[torch.Tensor, torch.Tensor]:
    text = call.extras.get("encoder_hidden_states_t5")
    return _text_and_mask(call, text, "text_embedding_mask_t5", "text_len_t5")


_SIZES = 6  # numbers of a picture's sizes


def _sizes(call: Call) -> torch.Tensor | None:
    """Height, width, wanted height, wanted width in pixels, top, left: versions 1.0 and 1.1 take them."""
    sizes = call.extras.get("image_meta_size")
    if not call.config["use_style_cond_and_image_meta_size"]:
        return None
    if sizes is None or sizes.shape[1:] != (_SIZES,):
        what = "HunyuanDiT takes image_meta_size of shape ({batch}, {sizes}), and got {got}."
        got = None if sizes is None else tuple(sizes.shape)
        fix = "Check the nodes that change the conditioning."
        raise RequestError(what, fix, batch=call.batch, sizes=_SIZES, got=got)
    return call.rows("image_meta_size", sizes)


def prepare(transformer: torch.nn.Module) -> None:
    """Let the transformer take an exact timestep."""
    dtype = transformer.get_parameter("text_embedding_padding").dtype
    # diffusers computes the embedding in the timestep's dtype, and ours is an exact float32.
    transformer.get_submodule("time_extra_emb").register_forward_pre_hook(
        lambda module, args, kwargs: (args, {**kwargs, "hidden_dtype": dtype}), with_kwargs=True
    )


HUNYUAN_DIT = ModelSpec(
    title="HunyuanDiT",
    transformer_class="HunyuanDiT2DModel",
    cut=(replace(IMAGE, joint={"image_rotary_emb": 0}, rows={"skip": ("hidden_states", 1)}, skips=True),),
    self_attention=("blocks.*.attn1",),
    timestep_embedder="time_extra_emb",
    extras=frozenset({"text_embedding_mask", "encoder_hidden_states_t5", "text_embedding_mask_t5", "image_meta_size"}),
    arguments={
        "encoder_hidden_states": lambda call: _clip(call)[0],
        "text_embedding_mask": lambda call: _clip(call)[1],
        "encoder_hidden_states_t5": lambda call: _t5(call)[0],
        "text_embedding_mask_t5": lambda call: _t5(call)[1],
        "image_rotary_emb": rotary_embedding,
        "image_meta_size": _sizes,
        "style": lambda call: None if _sizes(call) is None else call.x.new_zeros(call.batch, dtype=torch.long),
    },
    learned_sigma=True,
    prepare=prepare,
    widths={"encoder_hidden_states": "cross_attention_dim", "encoder_hidden_states_t5": "cross_attention_dim_t5"},
)
