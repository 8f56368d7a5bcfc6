"""The measures of benchmarks/pipefusion_quality.py are the published ones."""

from __future__ import annotations

import math

import pytest
import torch

from benchmarks.picture_distance import psnr, ssim


def noise(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def ssim_by_windows(x: torch.Tensor, y: torch.Tensor) -> float:
    """Wang et al. 2004, written window by window from weighted moments."""
    places = torch.arange(11, dtype=torch.float64) - 5
    weights = torch.exp(-(places[:, None] ** 2 + places[None, :] ** 2) / (2 * 1.5**2))
    weights /= weights.sum()
    peak = float(y.max() - y.min())
    values = []
    for top in range(x.shape[0] - 10):
        for left in range(x.shape[1] - 10):
            a, b = (each[top : top + 11, left : left + 11].double() for each in (x, y))
            mean_a, mean_b = (weights * a).sum(), (weights * b).sum()
            variance_a, variance_b = (weights * (a - mean_a) ** 2).sum(), (weights * (b - mean_b) ** 2).sum()
            covariance = (weights * (a - mean_a) * (b - mean_b)).sum()
            c1, c2 = (0.01 * peak) ** 2, (0.03 * peak) ** 2
            luminance = (2 * mean_a * mean_b + c1) / (mean_a**2 + mean_b**2 + c1)
            values.append(luminance * (2 * covariance + c2) / (variance_a + variance_b + c2))
    return float(torch.stack(values).mean())


def test_ssim_is_that_of_its_definition():
    exact = noise(1, 1, 17, 14)
    for strength in (0.1, 0.5, 2.0):
        other = exact + strength * noise(1, 1, 17, 14, seed=1) + 0.2
        assert ssim(other, exact) == pytest.approx(ssim_by_windows(other[0, 0], exact[0, 0]), abs=1e-9)


def test_ssim_is_the_mean_over_channels_and_one_for_equal_pictures():
    exact = noise(1, 2, 15, 15).clamp(-1, 1)
    exact[:, :, 0, 0], exact[:, :, 0, 1] = -1, 1  # every channel has the same range
    other = exact + 0.3 * noise(1, 2, 15, 15, seed=1)
    parts = [ssim(other[:, channel, None], exact[:, channel, None]) for channel in range(2)]
    assert ssim(other, exact) == pytest.approx(sum(parts) / 2)
    assert ssim(exact, exact) == pytest.approx(1)


def test_psnr_counts_the_error_in_decibels_of_the_range():
    exact = torch.tensor([[[[-1.0, 3.0], [0.0, 1.0]]]])
    assert psnr(exact + 0.4, exact) == pytest.approx(20)
    assert psnr(exact + 0.04, exact) == pytest.approx(40, abs=1e-3)
    assert psnr(exact, exact) == math.inf
