"""Tiny PixArt models: configs for tiny_model.py, and the tensors of ComfyUI's call."""

from __future__ import annotations

from typing import Any

import torch


def tiny_config(**changes: Any) -> dict[str, Any]:
    """Arguments of PixArtTransformer2DModel for PixArt-Σ: 4 heads of 72, as no tensor's shape tells the head dim.

    PixArt-α is `use_additional_conditions=True`. ComfyUI takes 16 heads and texts of width 4096 only:
    `tiny_config(num_attention_heads=16, caption_channels=4096)`.
    """
    width = 72 * changes.get("num_attention_heads", 4)
    return {
        "num_attention_heads": 4,
        "attention_head_dim": 72,
        "in_channels": 4,
        "out_channels": 8,
        "num_layers": 2,
        "cross_attention_dim": width,
        "patch_size": 2,
        "sample_size": 128,
        "caption_channels": 48,
        "use_additional_conditions": False,
        "interpolation_scale": None,
        **changes,
    }


def make_call(
    seed: int, size: tuple[int, int], batch: int = 1, text: int = 5, width: int = 48, micro: bool = False
) -> dict[str, torch.Tensor]:
    """Arguments of one call; `width` is the text's, `micro` adds PixArt-α's micro-conditions."""
    generator = torch.Generator().manual_seed(seed)
    call = {
        "x": torch.randn(batch, 4, *size, generator=generator),
        "timestep": torch.tensor([904.0, 31.25, 500.0])[:batch],
        "context": torch.randn(batch, text, width, generator=generator),
    }
    if micro:
        call["c_size"] = torch.tensor([[512.0, 768.0]]).expand(batch, -1).contiguous()
        call["c_ar"] = torch.tensor([[0.66]]).expand(batch, -1).contiguous()
    return call
