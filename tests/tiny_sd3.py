"""Sizes of tiny SD3 and SD3.5 transformers; tiny_model.py makes the files."""

from __future__ import annotations

from typing import Any


def tiny_config(layers: int = 4, **changes: Any) -> dict[str, Any]:
    """Arguments of SD3Transformer2DModel for a few million parameters, all in the form of SD3.5 medium.

    ComfyUI takes as many heads as there are blocks, and heads of 64. SD3 is `qk_norm=None`; SD3 and SD3.5 large have
    `dual_attention_layers=()`.
    """
    return {
        "sample_size": 128,
        "patch_size": 2,
        "in_channels": 16,
        "out_channels": 16,
        "num_layers": layers,
        "attention_head_dim": 64,
        "num_attention_heads": layers,
        "joint_attention_dim": 64,
        "caption_projection_dim": 64 * layers,
        "pooled_projection_dim": 32,
        "pos_embed_max_size": 12,
        "dual_attention_layers": (0, 1),
        "qk_norm": "rms_norm",
        **changes,
    }
