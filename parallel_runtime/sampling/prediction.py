"""What a model's output means: a velocity of rectified flow, the noise, or v; and the noise path that goes with it.

Flow stands on the path x = (1 - sigma) * latent + sigma * noise, sigma from 1 to 0. The other two were trained on
diffusion and stand, in a sampler's hands, on x = latent + sigma * noise with sigma from about 15 to 0 (Karras et al.
2022, the variance-exploding form); their transformer wants that x brought back to unit variance.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

import torch


@dataclass(frozen=True)
class Prediction:
    """A parameterization. All functions work position by position; sigma is 0-dim, on x's device.

    Args:
        model_input: (x, sigma) -> what the transformer sees.
        denoised: (x, output, sigma) -> denoised latent, in x's dtype.
        add_noise: (latent, noise, sigma) -> the point of the noise path at sigma.
    """

    name: str
    model_input: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
    denoised: Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
    add_noise: Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


def _unscaled(x: torch.Tensor, sigma: torch.Tensor) -> torch.Tensor:
    return x


def _unit_variance(x: torch.Tensor, sigma: torch.Tensor) -> torch.Tensor:
    return x / (sigma**2 + 1.0) ** 0.5


def _exploding(latent: torch.Tensor, noise: torch.Tensor, sigma: torch.Tensor) -> torch.Tensor:
    return noise * sigma + latent


def _straight(latent: torch.Tensor, noise: torch.Tensor, sigma: torch.Tensor) -> torch.Tensor:
    return sigma * noise + (1.0 - sigma) * latent


def _denoised_from_velocity(x: torch.Tensor, output: torch.Tensor, sigma: torch.Tensor) -> torch.Tensor:
    """The end of the straight line through x along the velocity dx/dsigma (Liu et al. 2022)."""
    return x - output.to(x.dtype) * sigma


def _denoised_from_v(x: torch.Tensor, output: torch.Tensor, sigma: torch.Tensor) -> torch.Tensor:
    """v = alpha * noise - sigma_vp * latent (Salimans & Ho 2022), on the scale of the exploding path."""
    variance = sigma**2 + 1.0
    return x / variance - output.to(x.dtype) * sigma / variance**0.5


FLOW = Prediction("flow", _unscaled, _denoised_from_velocity, _straight)
# x minus the noise in it: the same line as along a velocity.
EPS = Prediction("eps", _unit_variance, _denoised_from_velocity, _exploding)
V_PREDICTION = Prediction("v_prediction", _unit_variance, _denoised_from_v, _exploding)

PREDICTIONS: Mapping[str, Prediction] = MappingProxyType({kind.name: kind for kind in (FLOW, EPS, V_PREDICTION)})
