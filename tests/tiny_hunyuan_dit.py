"""Tiny HunyuanDiT models: configs for tiny_model.py, and the tensors of ComfyUI's call."""

from __future__ import annotations

from typing import Any

import torch

COMFYUI_TEXTS = {
    "cross_attention_dim": 1024,
    "cross_attention_dim_t5": 2048,
    "pooled_projection_dim": 1024,
    "text_len": 77,
    "text_len_t5": 256,
}
"""What ComfyUI takes for granted; it also takes 16 heads, and picture sizes only where the width is 1408."""


def tiny_config(**changes: Any) -> dict[str, Any]:
    """Arguments of HunyuanDiT2DModel for version 1.2: 4 heads of 16, one long skip from block 0 to block 3.

    Version 1.1 is `use_style_cond_and_image_meta_size=True`.
    """
    heads, dim = changes.get("num_attention_heads", 4), changes.get("attention_head_dim", 16)
    return {
        "num_attention_heads": heads,
        "attention_head_dim": dim,
        "in_channels": 4,
        "patch_size": 2,
        "hidden_size": heads * dim,
        "num_layers": 4,
        "mlp_ratio": 4.0,
        "cross_attention_dim": 24,
        "cross_attention_dim_t5": 32,
        "pooled_projection_dim": 40,
        "text_len": 5,
        "text_len_t5": 7,
        "use_style_cond_and_image_meta_size": False,
        **changes,
    }


def make_call(
    seed: int,
    size: tuple[int, int],
    batch: int = 1,
    texts: tuple[int, int] = (5, 7),
    widths: tuple[int, int] = (24, 32),
    sizes: bool = False,
) -> dict[str, torch.Tensor]:
    """Arguments of one call; `texts` are the lengths of the two texts, of which some tokens are masked.

    Args:
        sizes: adds the picture sizes of version 1.1.
    """
    generator = torch.Generator().manual_seed(seed)

    def noise(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    def mask(length: int) -> torch.Tensor:
        return (torch.arange(length) < torch.tensor([[length - 2], [3], [length]])[:batch]).long()

    call = {
        "x": noise(batch, 4, *size),
        "timestep": torch.tensor([904.0, 31.25, 500.0])[:batch],
        "context": noise(batch, texts[0], widths[0]),
        "text_embedding_mask": mask(texts[0]),
        "encoder_hidden_states_t5": noise(batch, texts[1], widths[1]),
        "text_embedding_mask_t5": mask(texts[1]),
    }
    if sizes:
        call["image_meta_size"] = torch.tensor([[768.0, 512.0, 1024.0, 640.0, 0.0, 0.0]]).expand(batch, -1).contiguous()
    return call
