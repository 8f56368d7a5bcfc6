"""Sizes of tiny FLUX.2 transformers; tiny_model.py makes the files."""

from __future__ import annotations

from typing import Any


def tiny_config(**changes: Any) -> dict[str, Any]:
    """Arguments of Flux2Transformer2DModel for a few million parameters, heads of 128 as ComfyUI fixes them.

    klein is `guidance_embeds=False`.
    """
    return {
        "patch_size": 1,
        "in_channels": 128,
        "out_channels": 128,
        "num_layers": 1,
        "num_single_layers": 2,
        "attention_head_dim": 128,
        "num_attention_heads": 2,
        "joint_attention_dim": 64,
        "timestep_guidance_channels": 256,
        "mlp_ratio": 3.0,
        "axes_dims_rope": (32, 32, 32, 32),
        "rope_theta": 2000,
        "eps": 1e-6,
        "guidance_embeds": True,
        **changes,
    }
