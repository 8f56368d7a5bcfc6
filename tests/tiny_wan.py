"""Sizes of tiny Wan transformers; tiny_model.py makes the files."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from parallel_runtime.networks.diffusers.wan import WAN
from tests.tiny_model import make_state_dict


def tiny_config(**changes: Any) -> dict[str, Any]:
    """Arguments of WanTransformer3DModel for a few million parameters; ComfyUI fixes head dim and text width.

    Image-to-video is `image_config()` on top.
    """
    return {
        "patch_size": (1, 2, 2),
        "num_attention_heads": 2,
        "attention_head_dim": 128,
        "in_channels": 16,
        "out_channels": 16,
        "text_dim": 4096,
        "freq_dim": 256,
        "ffn_dim": 384,
        "num_layers": 2,
        "cross_attn_norm": True,
        "qk_norm": "rms_norm_across_heads",
        "eps": 1e-6,
        "image_dim": None,
        "added_kv_proj_dim": None,
        "pos_embed_seq_len": None,
        **changes,
    }


def image_config(**changes: Any) -> dict[str, Any]:
    """A start image: 20 more input channels, and CLIP's view of it."""
    return tiny_config(in_channels=36, image_dim=1280, added_kv_proj_dim=256, num_layers=1, **changes)


def build_transformer(
    config: Mapping[str, Any] | None = None, dtype: torch.dtype = torch.float32, **changes: Any
) -> Any:
    """Return a prepared WanTransformer3DModel, by default with 4 heads of 32, the same in every process."""
    from diffusers import WanTransformer3DModel

    small = {"num_attention_heads": 4, "attention_head_dim": 32, "text_dim": 48, "ffn_dim": 256, "freq_dim": 32}
    config = config or tiny_config(**{**small, **changes})
    transformer: Any = WanTransformer3DModel(**config)
    transformer.load_state_dict(make_state_dict(WAN, config))
    return transformer.requires_grad_(False).eval().to(dtype)
