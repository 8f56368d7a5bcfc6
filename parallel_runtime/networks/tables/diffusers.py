"""diffusers' classes as data, in the words of ComfyUI's: class -> how ranks share out the tokens of its blocks.

A class that is not here, such as a U-Net, shares out the batch alone. Which modules attend over the tokens, and what
else there is to a family, its ModelSpec says.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from .blocks import Blocks, Network

_TEXT_AND_IMAGE = Blocks(
    "transformer_blocks",
    {"encoder_hidden_states": 1, "hidden_states": 1},
    ("encoder_hidden_states", "hidden_states"),
    joint={"image_rotary_emb": 0},
    alike=("temb", "joint_attention_kwargs"),
    modulations={"temb": ("norm1.linear", "norm1_context.linear")},
    latent="hidden_states",
)
_IMAGE = Blocks(
    "blocks",
    {"hidden_states": 1},
    ("hidden_states",),
    texts=("attn2",),
    alike=("encoder_hidden_states", "temb"),
    longer={"encoder_hidden_states": 1},
    latent="hidden_states",
)

_CUT: Mapping[str, tuple[Blocks, ...]] = {
    "FluxTransformer2DModel": (
        _TEXT_AND_IMAGE,
        replace(
            _TEXT_AND_IMAGE, path="single_transformer_blocks", modulations={"temb": ("norm.linear",)}, parallel=True
        ),
    ),
    "Flux2Transformer2DModel": (
        replace(_TEXT_AND_IMAGE, alike=("temb_mod_img", "temb_mod_txt", "joint_attention_kwargs"), modulations={}),
        Blocks(
            "single_transformer_blocks",
            {"hidden_states": 1},
            ("hidden_states",),
            joint={"image_rotary_emb": 0},
            alike=("temb_mod", "joint_attention_kwargs", "split_hidden_states"),
            whole_with=("encoder_hidden_states", "text_seq_len"),
            latent="hidden_states",
        ),
    ),
    # Image tokens come first, and in some blocks of SD3.5 medium they attend to each other once more.
    "SD3Transformer2DModel": (
        replace(
            _TEXT_AND_IMAGE,
            tokens={"hidden_states": 1, "encoder_hidden_states": 1},
            joint={},
            alone="hidden_states",
            again="attn2",
        ),
    ),
    "WanTransformer3DModel": (replace(_IMAGE, joint={"rotary_emb": 1}),),
    "HunyuanDiT2DModel": (
        replace(_IMAGE, joint={"image_rotary_emb": 0}, rows={"skip": ("hidden_states", 1)}, skips=True),
    ),
    "PixArtTransformer2DModel": (
        replace(
            _IMAGE,
            path="transformer_blocks",
            alike=(
                "encoder_hidden_states",
                "encoder_attention_mask",
                "timestep",
                "cross_attention_kwargs",
                "class_labels",
                "added_cond_kwargs",
            ),
            longer={"encoder_hidden_states": 1, "encoder_attention_mask": 2},
            whole_with=("attention_mask",),
        ),
    ),
}

DIFFUSERS: Mapping[str, Network] = {
    name: Network(
        name,
        blocks,
        heads="config.num_attention_heads",
        head_dim="config.attention_head_dim",
        stages=True,
        behind=name.startswith("Flux"),
    )
    for name, blocks in _CUT.items()
}


def cut_of(transformer_class: str) -> tuple[Blocks, ...]:
    """The lists of blocks whose tokens are shared out; () where the batch alone is."""
    return DIFFUSERS[transformer_class].blocks if transformer_class in DIFFUSERS else ()
