"""Samplers under ComfyUI's names and with its results: what each makes of a step, one position at a time.

Those that stages and runs without ComfyUI need most; all others are ComfyUI's own functions (denoising/guider.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

import torch

from .steps import Rule, Step


def euler(step: Step, x: torch.Tensor, denoised: torch.Tensor) -> torch.Tensor:
    """First order along the probability-flow ODE (Karras et al. 2022, algorithm 1 without its correction)."""
    return x + (x - denoised) / step.sigma * (step.sigma_next - step.sigma)


def dpmpp_2m(step: Step, x: torch.Tensor, denoised: torch.Tensor) -> torch.Tensor:
    """DPM-Solver++(2M), Lu et al. 2022, in the log of sigma; first order at the first step and on the way to 0."""
    log_sigma, log_next = step.sigma.log(), step.sigma_next.log()
    towards = denoised
    if step.previous is not None and not step.ends_clean:
        previous_sigma, previous_denoised = step.previous
        reach = (previous_sigma.log() - log_sigma) / (log_sigma - log_next)
        weight = 1 / (2 * reach)
        towards = (1 + weight) * denoised - weight * previous_denoised
    # exp(log) and expm1 rather than sigma_next / sigma: the last bit is then ComfyUI's as well.
    return log_next.exp() / log_sigma.exp() * x - (log_next - log_sigma).expm1() * towards


SAMPLERS: Mapping[str, Rule] = MappingProxyType({"euler": euler, "dpmpp_2m": dpmpp_2m})
SUPPORTED = tuple(SAMPLERS)
