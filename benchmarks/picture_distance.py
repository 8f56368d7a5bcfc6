"""How far two pictures are apart: PSNR and SSIM, of latents and of decoded pictures alike."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F

_WINDOW, _SPREAD = 11, 1.5
_STABILISERS = (0.01, 0.03)


def psnr(picture: torch.Tensor, exact: torch.Tensor) -> float:
    """Peak signal-to-noise ratio in dB; the peak is the range of `exact`. Infinite where the two are equal."""
    error = (picture.double() - exact.double()).square().mean().item()
    return 10 * math.log10(_range(exact) ** 2 / error) if error else math.inf


def ssim(picture: torch.Tensor, exact: torch.Tensor) -> float:
    """Structural similarity (Wang et al. 2004), the mean over all channels and places; 1 where the two are equal.

    Gaussian windows of 11 pixels, only those that lie inside.

    Args:
        picture, exact: (batch, channels, height, width), sides of at least 11.
    """
    x, y = (each.double().flatten(0, 1)[:, None] for each in (picture, exact))
    c1, c2 = ((share * _range(exact)) ** 2 for share in _STABILISERS)
    mean_x, mean_y = _blur(x), _blur(y)
    variance_x, variance_y = _blur(x * x) - mean_x**2, _blur(y * y) - mean_y**2
    covariance = _blur(x * y) - mean_x * mean_y
    luminance = (2 * mean_x * mean_y + c1) / (mean_x**2 + mean_y**2 + c1)
    structure = (2 * covariance + c2) / (variance_x + variance_y + c2)
    return (luminance * structure).mean().item()


def _range(exact: torch.Tensor) -> float:
    return (exact.max() - exact.min()).item()


def _blur(pictures: torch.Tensor) -> torch.Tensor:
    places = torch.arange(_WINDOW, dtype=pictures.dtype, device=pictures.device) - _WINDOW // 2
    weights = torch.exp(-(places**2) / (2 * _SPREAD**2))
    weights = weights / weights.sum()
    return F.conv2d(F.conv2d(pictures, weights.view(1, 1, 1, -1)), weights.view(1, 1, -1, 1))
