"""HunyuanDiT (1.0, 1.1, 1.2): diffusers' HunyuanDiT2DModel as data; it predicts the velocity (not that of a flow).

diffusers has no converter for Tencent's files: the key rules are written by hand. The authors number a block's norms by
when they were written, diffusers by when they are used.
"""

from __future__ import annotations

import torch

from ...errors import RequestError
from ...said import said
from .call import Call
from .centred_rotary import rotary_of
from .headers import count_blocks
from .key_rules import KeyRules
from .padded_texts import fit_padding, masked_text
from .recognition import Config, Header, Recognition, Sizes
from .spec import ModelSpec
from .whole_latent_adapter import WholeLatentAdapter

_PATCH = 2
_SIZES, _SIZE_CHANNELS = 6, 6 * 256  # numbers of a picture's sizes, and the width that they are embedded in
_TEXT, _MASK = masked_text(lambda call: call.context, "text_embedding_mask", "text_len")
_TEXT_T5, _MASK_T5 = masked_text(
    lambda call: call.extras.get("encoder_hidden_states_t5"), "text_embedding_mask_t5", "text_len_t5"
)


def _sizes(call: Call) -> torch.Tensor | None:
    """Height, width, wanted height, wanted width in pixels, top, left: versions 1.0 and 1.1 take them."""
    sizes = call.extras.get("image_meta_size")
    if not call.config["use_style_cond_and_image_meta_size"]:
        return None
    if sizes is None or sizes.shape[1:] != (_SIZES,):
        got = None if sizes is None else tuple(sizes.shape)
        raise RequestError(
            said(
                "HunyuanDiT takes image_meta_size of shape ({batch}, {sizes}), and got {got}.",
                batch=call.batch,
                sizes=_SIZES,
                got=got,
            ),
            "Check the nodes that change the conditioning.",
        )
    return call.rows("image_meta_size", sizes)


def _further(sizes: Sizes, header: Header) -> Config | None:
    width, pooled, channels = sizes["_width"], sizes["pooled_projection_dim"], sizes["in_channels"]
    style = sizes["_extra"] == pooled + _SIZE_CHANNELS + width
    # The second half of the blocks takes what the first half gave, so there is no middle one.
    paired = count_blocks(header, "blocks.") % 2 == 0
    if sizes["_output"] != 2 * channels * _PATCH**2 or not (style or sizes["_extra"] == pooled) or not paired:
        return None
    text_t5 = sizes["_positions"] - 1
    return {
        "hidden_size": width,
        "mlp_ratio": (sizes["_inner"] + 0.5) / width,  # half a neuron more, as diffusers rounds the product down
        "text_len": sizes["_padding"] - text_t5,
        "text_len_t5": text_t5,
        "use_style_cond_and_image_meta_size": style,
    }


def prepare(transformer: torch.nn.Module) -> None:
    """Let the transformer take an exact timestep, and texts longer than it learned."""
    fit_padding(transformer)
    dtype = transformer.get_parameter("text_embedding_padding").dtype
    # diffusers computes the embedding in the timestep's dtype, and ours is an exact float32.
    transformer.get_submodule("time_extra_emb").register_forward_pre_hook(
        lambda module, args, kwargs: (args, {**kwargs, "hidden_dtype": dtype}), with_kwargs=True
    )


HUNYUAN_DIT = ModelSpec(
    name="hunyuan_dit",
    title="HunyuanDiT",
    transformer_class="HunyuanDiT2DModel",
    block_lists=("blocks",),
    self_attention=("blocks.*.attn1",),
    timestep_embedder="time_extra_emb",
    keys=KeyRules.read("hunyuan_dit"),
    recognise=Recognition(
        shapes={
            "pos_embed.proj.weight": ("_width", "in_channels", _PATCH, _PATCH),
            "text_embedder.linear_2.weight": ("cross_attention_dim", ""),
            "proj_out.weight": ("_output", ""),
            "text_embedding_padding": ("_padding", ""),
            "time_extra_emb.pooler.positional_embedding": ("_positions", "cross_attention_dim_t5"),
            "time_extra_emb.pooler.c_proj.weight": ("pooled_projection_dim", ""),
            "time_extra_emb.extra_embedder.linear_1.weight": ("", "_extra"),
            "blocks.0.attn1.norm_q.weight": ("attention_head_dim",),
            "blocks.0.attn1.to_q.weight": None,
            "blocks.0.ff.net.0.proj.weight": ("_inner", ""),
        },
        blocks={"num_layers": "blocks"},
        settings={"patch_size": _PATCH},
        lookalikes=("controlnet_", "after_proj_list.", "input_block."),
        further=_further,
    ),
    adapter=WholeLatentAdapter(
        "HunyuanDiT",
        extras=frozenset(
            {"text_embedding_mask", "encoder_hidden_states_t5", "text_embedding_mask_t5", "image_meta_size"}
        ),
        arguments={
            "encoder_hidden_states": _TEXT,
            "text_embedding_mask": _MASK,
            "encoder_hidden_states_t5": _TEXT_T5,
            "text_embedding_mask_t5": _MASK_T5,
            "image_rotary_emb": rotary_of,
            "image_meta_size": _sizes,
            "style": lambda call: None if _sizes(call) is None else call.x.new_zeros(call.batch, dtype=torch.long),
        },
        learned_sigma=True,
    ),
    prepare=prepare,
    widths={"encoder_hidden_states": "cross_attention_dim", "encoder_hidden_states_t5": "cross_attention_dim_t5"},
)
