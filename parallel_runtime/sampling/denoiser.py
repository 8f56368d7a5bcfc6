"""From the transformer's velocities to the denoised latent that a sampler asks for: flow, CFG, inpaint mask."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from ..errors import RequestError
from .flow import add_noise, denoised_from_velocity

Predict = Callable[[torch.Tensor, torch.Tensor], Sequence[torch.Tensor]]
"""(x (B, C, H, W) float32, timestep (B,) float32) -> one velocity like x per CFG branch: cond, then uncond if any.

All branches of a step are asked for in one call, so that they can share a batch or be split over the cfg axis.
"""


def needs_uncond(cfg: float) -> bool:
    """Whether the unconditional branch can change the result; at CFG 1 ComfyUI does not evaluate it."""
    return not math.isclose(cfg, 1.0)


def combine_branches(denoised: Sequence[torch.Tensor], cfg: float) -> torch.Tensor:
    """Classifier-free guidance (Ho & Salimans 2022) over denoised latents: cond, then uncond if there is one.

    Raises:
        RequestError: no branch, more than two, or a missing unconditional branch that `cfg` needs.
    """
    if not 1 <= len(denoised) <= 2:
        raise RequestError(
            f"A step gave {len(denoised)} CFG branches, and guidance combines one or two.",
            "Use one positive and one negative conditioning.",
        )
    if not needs_uncond(cfg):
        return denoised[0]
    if len(denoised) == 1:
        raise RequestError(f"CFG {cfg:g} needs a negative conditioning.", "Connect one, or set CFG to 1.")
    cond, uncond = denoised
    return uncond + (cond - uncond) * cfg


@dataclass(frozen=True)
class Inpaint:
    """Keeps a latent where the mask is 0. Tensors are float32 and broadcastable to x, on x's device.

    Args:
        mask: 1 where the picture is made anew, 0 where it stays; values between mix.
        latent_image: what stays, on the scale of the model (after ComfyUI's process_in).
        noise: what the kept part is noised with while the loop runs.
    """

    mask: torch.Tensor
    latent_image: torch.Tensor
    noise: torch.Tensor

    def before(self, x: torch.Tensor, sigma: torch.Tensor) -> torch.Tensor:
        """Return what the model sees: the kept part stands at this sigma of its own noise path."""
        return x * self.mask + add_noise(self.latent_image, self.noise, sigma) * (1.0 - self.mask)

    def after(self, denoised: torch.Tensor) -> torch.Tensor:
        """Return the denoised latent with the kept part put back."""
        return denoised * self.mask + self.latent_image * (1.0 - self.mask)


@dataclass(frozen=True)
class FlowDenoiser:
    """`denoise(x, sigma)` of a flow model: what samplers call, made of `predict`.

    Args:
        predict: see `Predict`; may return a lower precision, the latent stays in x's.
        cfg: guidance scale.
        multiplier: timestep = sigma * multiplier (ComfyUI: 1 for FLUX, 1000 for SD3).
        inpaint: mask and what it keeps, if any.

    Raises (when called):
        RequestError: see `combine_branches`.
    """

    predict: Predict
    cfg: float = 1.0
    multiplier: float = 1.0
    inpaint: Inpaint | None = None

    def __call__(self, x: torch.Tensor, sigma: torch.Tensor) -> torch.Tensor:
        """Return the denoised latent, shape and dtype of `x` (B, C, H, W); `sigma` is 0-dim, on x's device."""
        seen = x if self.inpaint is None else self.inpaint.before(x, sigma)
        # float32 up to the embedder: a timestep rounded to bf16 is a different timestep.
        timestep = (sigma * self.multiplier).float().expand(x.shape[0])
        branches = [denoised_from_velocity(seen, velocity, sigma) for velocity in self.predict(seen, timestep)]
        denoised = combine_branches(branches, self.cfg)
        return denoised if self.inpaint is None else self.inpaint.after(denoised)
