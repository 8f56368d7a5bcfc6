"""The straight path of rectified flow: x(sigma) = (1 - sigma) * latent + sigma * noise, sigma from 1 down to 0.

Source: Liu et al., "Flow Straight and Fast" (2022). The velocity dx/dsigma is what the transformer predicts.
"""

from __future__ import annotations

import torch


def add_noise(latent: torch.Tensor, noise: torch.Tensor, sigma: torch.Tensor) -> torch.Tensor:
    """Return the point of the path at `sigma` (0-dim, or broadcastable to the latent)."""
    return sigma * noise + (1.0 - sigma) * latent


def denoised_from_velocity(x: torch.Tensor, velocity: torch.Tensor, sigma: torch.Tensor) -> torch.Tensor:
    """Return the latent at the end of the straight line through `x` along `velocity`, in x's dtype."""
    return x - velocity.to(x.dtype) * sigma
