"""Sides of latents that a patch does not divide."""

from __future__ import annotations

import torch


def tokens_along(size: int, patch: int) -> int:
    """Tokens along one side of `size` latent pixels, of which each token has `patch`; the last may be padding."""
    return -(-size // patch)


def pad_sides(x: torch.Tensor, patch: int) -> torch.Tensor:
    """(..., H, W) with sides that `patch` divides: they continue circularly, as in ComfyUI. Frames stay."""
    below, right = -x.shape[-2] % patch, -x.shape[-1] % patch
    if not below and not right:
        return x
    return torch.nn.functional.pad(x, (0, right, 0, below) + (0, 0) * (x.ndim - 4), mode="circular")
