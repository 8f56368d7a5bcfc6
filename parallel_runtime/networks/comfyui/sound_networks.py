"""Networks that make music, as data."""

from __future__ import annotations

from collections.abc import Mapping

from .blocks import Blocks, Network

_OPTIONS = ("transformer_options",)


SOUND: Mapping[str, Network] = {
    # Every other layer attends within a window, which it makes from the number of its tokens. The timbres of all rows
    # of a batch go to the first.
    "comfy.ldm.ace.ace_step15:AceStepConditionGenerationModel": Network(
        "ACE-Step 1.5",
        (
            Blocks(
                "decoder.layers", {"hidden_states": 1}, ("hidden_states",), joint={"position_embeddings": 0},
                cross=("cross_attn",), when={"self_attn.sliding_window": None},
                alike=("temb", "encoder_hidden_states", "attention_mask", "encoder_attention_mask"),
            ),
        ),
        attention_in=("comfy.ldm.ace.ace_step15",),
        heads="decoder.layers.0.self_attn.num_heads", rows_together=True,
    ),
    "comfy.ldm.ace.model:ACEStepTransformer2DModel": Network(
        "ACE-Step", whole="its blocks convolve along the song, and their linear attention sums over it"
    ),
    "comfy.ldm.audio.dit:AudioDiffusionTransformer": Network(
        "Stable Audio",
        (
            Blocks(
                "transformer.layers", {"x": 1}, ("x",), joint={"rotary_pos_emb": 0}, cross=("cross_attn",),
                when={"self_attn.feat_scale": False, "conformer": None}, whole_with=("mask", "local_add_cond"),
                alike=("context", "global_cond", "context_mask", *_OPTIONS),
            ),
        ),
        heads="transformer.layers.0.self_attn.num_heads",
    ),
    "comfy.ldm.minimax_music.dit:MiniMaxMusic3DiT": Network(
        "MiniMax Music",
        (
            Blocks(
                "diffusion_transformer.transformer.layers", {"x": 1}, ("x",), joint={"rotation_matrix": 2},
            ),
        ),
        attention_in=("comfy.ldm.minimax_music.dit",),
        heads="diffusion_transformer.transformer.layers.0.self_attn.num_heads",
    ),
}  # fmt: skip
