"""From the transformer's outputs to the denoised latent that a sampler asks for: prediction, CFG, inpaint mask.

An output is a velocity of rectified flow, the noise, or v. Flow stands on the path x = (1 - sigma) * latent +
sigma * noise, sigma from 1 to 0. The other two were trained on diffusion and stand, in a sampler's hands, on
x = latent + sigma * noise with sigma from about 15 to 0 (Karras et al. 2022, the variance-exploding form); their
transformer wants that x brought back to unit variance.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

import torch

from ..errors import RequestError
from .samplers import Evaluation


@dataclass(frozen=True)
class Prediction:
    """A parameterization, position by position; sigma is 0-dim, on x's device: what the transformer sees of (x, sigma);
    the denoised latent, in x's dtype, of (x, output, sigma); the point of the noise path of (latent, noise, sigma)."""

    name: str
    model_input: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
    denoised: Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
    add_noise: Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


def _unit_variance(x: torch.Tensor, sigma: torch.Tensor) -> torch.Tensor:
    return x / (sigma**2 + 1.0) ** 0.5


def _exploding(latent: torch.Tensor, noise: torch.Tensor, sigma: torch.Tensor) -> torch.Tensor:
    return noise * sigma + latent


def _denoised_from_velocity(x: torch.Tensor, output: torch.Tensor, sigma: torch.Tensor) -> torch.Tensor:
    """The end of the straight line through x along the velocity dx/dsigma (Liu et al. 2022)."""
    return x - output.to(x.dtype) * sigma


def _denoised_from_v(x: torch.Tensor, output: torch.Tensor, sigma: torch.Tensor) -> torch.Tensor:
    """v = alpha * noise - sigma_vp * latent (Salimans & Ho 2022), on the scale of the exploding path."""
    variance = sigma**2 + 1.0
    return x / variance - output.to(x.dtype) * sigma / variance**0.5


FLOW = Prediction(
    "flow",
    model_input=lambda x, sigma: x,
    denoised=_denoised_from_velocity,
    add_noise=lambda latent, noise, sigma: sigma * noise + (1.0 - sigma) * latent,
)
# x minus the noise in it: the same line as along a velocity.
EPS = Prediction("eps", _unit_variance, _denoised_from_velocity, _exploding)
V_PREDICTION = Prediction("v_prediction", _unit_variance, _denoised_from_v, _exploding)

PREDICTIONS: Mapping[str, Prediction] = MappingProxyType({kind.name: kind for kind in (FLOW, EPS, V_PREDICTION)})

Predict = Callable[[torch.Tensor, torch.Tensor], Sequence[torch.Tensor]]
"""(x (B, C, ...) float32, timestep (B,) float32) -> one output like x per CFG branch: cond, then uncond if any. All of
a step are asked for in one call, so that they can share a batch or be split over the cfg axis."""


def check_guidance(branches: int, cfg: float) -> None:
    """RequestError, before the first evaluation, for a CFG that is no number, or needs a branch that is missing."""
    if not math.isfinite(cfg):
        raise RequestError("CFG is {cfg}, which is no number.", "Set it to a number.", cfg=cfg)
    if branches == 1 and not math.isclose(cfg, 1.0):
        raise RequestError("CFG {cfg} needs a negative conditioning.", "Connect one, or set CFG to 1.", cfg=f"{cfg:g}")


@dataclass(frozen=True)
class Inpaint:
    """Keeps `latent_image`, on the scale of the model (after ComfyUI's process_in), where the mask is 0; values between
    0 and 1 mix. While the loop runs, the kept part is noised with `noise`, or not if `clean`: the model is told that it
    is finished. Tensors are float32 and broadcastable to x, on x's device."""

    mask: torch.Tensor
    latent_image: torch.Tensor
    noise: torch.Tensor
    clean: bool = False

    def before(self, x: torch.Tensor, sigma: torch.Tensor, prediction: Prediction) -> torch.Tensor:
        """Return what the model sees: the kept part stands at this sigma of its own noise path."""
        kept = self.latent_image if self.clean else prediction.add_noise(self.latent_image, self.noise, sigma)
        return x * self.mask + kept * (1.0 - self.mask)

    def after(self, denoised: torch.Tensor) -> torch.Tensor:
        """Return the denoised latent with the kept part put back."""
        return denoised * self.mask + self.latent_image * (1.0 - self.mask)

    def part(self, index: Any) -> Inpaint:
        """The same for a part of the latent; the tensors must have the latent's own shape."""
        return Inpaint(self.mask[index], self.latent_image[index], self.noise[index], self.clean)


@dataclass(frozen=True)
class Denoiser:
    """`denoise(evaluation)`: what samplers call, made of `predict`, which may return a lower precision; for any part of
    a latent. `timesteps`, (steps + 1,) float32 on x's device, are ComfyUI's for each sigma of the run. A pipeline, in
    which other ranks run the transformer, uses `masked`, `model_input` and `finish` instead of the call."""

    predict: Predict
    prediction: Prediction
    timesteps: torch.Tensor
    cfg: float = 1.0
    inpaint: Inpaint | None = None

    def __call__(self, evaluation: Evaluation) -> torch.Tensor:
        """Return the denoised latent, shape and dtype of the evaluation's x."""
        # float32 up to the embedder: a timestep rounded to bf16 is a different timestep.
        timestep = self.timesteps[evaluation.index].float().expand(evaluation.x.shape[0])
        masked = self.masked(evaluation)
        return self.finish(masked, self.predict(self.model_input(masked), timestep))

    def masked(self, evaluation: Evaluation) -> Evaluation:
        """The evaluation of the latent in which what the mask keeps stands, once for each."""
        if self.inpaint is None:
            return evaluation
        return replace(evaluation, x=self.inpaint.before(evaluation.x, evaluation.sigma, self.prediction))

    def model_input(self, masked: Evaluation) -> torch.Tensor:
        """What the transformer is to see, (B, C, ...) float32."""
        return self.prediction.model_input(masked.x, masked.sigma)

    def finish(self, masked: Evaluation, outputs: Sequence[torch.Tensor]) -> torch.Tensor:
        """Return the denoised latent from the outputs of the CFG branches, read against the latent before scaling."""
        denoised, *others = (self.prediction.denoised(masked.x, output, masked.sigma) for output in outputs)
        if not math.isclose(self.cfg, 1.0):  # Ho & Salimans 2022; at 1 ComfyUI evaluates no other branch
            (uncond,) = others
            denoised = uncond + (denoised - uncond) * self.cfg
        return denoised if self.inpaint is None else self.inpaint.after(denoised)

    def part(self, index: Any) -> Denoiser:
        """The same for a part of the latent, named by a tensor index."""
        return self if self.inpaint is None else replace(self, inpaint=self.inpaint.part(index))
