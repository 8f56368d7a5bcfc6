"""A whole sampling run around the pool's samplers, as nodes/pool_loop.py and the ranks make it together.

Start scaling, noise under the mask and the final scaling.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from parallel_runtime.errors import RequestError
from parallel_runtime.sampling.denoiser import FLOW, Denoiser, Inpaint, Predict
from parallel_runtime.sampling.samplers import SAMPLERS, Evaluation, OnStep, run_steps


@dataclass(frozen=True)
class SampleSettings:
    """The plain values of a run.

    Args:
        sampler: one of `samplers.SUPPORTED`.
        cfg: guidance scale.
        multiplier: timestep = sigma * multiplier.

    Raises:
        RequestError: a number that is not finite.
    """

    sampler: str
    cfg: float = 1.0
    multiplier: float = 1.0

    def __post_init__(self) -> None:
        for name in ("cfg", "multiplier"):
            if not math.isfinite(getattr(self, name)):
                raise RequestError(f"The {name} is {getattr(self, name)}.", "Give a finite number.")


def _spreads_over(tensor: torch.Tensor, noise: torch.Tensor) -> bool:
    return tensor.ndim == noise.ndim and all(
        own in (1, wanted) for own, wanted in zip(tensor.shape, noise.shape, strict=True)
    )


def _check_inputs(
    sigmas: torch.Tensor, noise: torch.Tensor, latent_image: torch.Tensor, mask: torch.Tensor | None
) -> None:
    """Refuse what could only give NaN. Pure, and the same on every rank: nothing has been exchanged yet."""
    for name, tensor in {"sigmas": sigmas, "noise": noise, "latent": latent_image, "noise mask": mask}.items():
        if tensor is not None and not bool(torch.isfinite(tensor).all()):
            raise RequestError(
                f"The {name} of this run holds NaN or infinity.",
                "Look at the node that makes it; its output is damaged.",
            )
    if sigmas.ndim != 1 or len(sigmas) == 0:
        raise RequestError(f"Sigmas of shape {tuple(sigmas.shape)} are no schedule.", "Give a list of sigmas.")
    levels = sigmas.tolist()
    if min(levels) < 0 or 0 in levels[:-1]:
        raise RequestError(
            "The sigmas fall to 0 or below before their end.", "Use a schedule in which only the last sigma is 0."
        )
    for name, tensor in {"latent": latent_image, "noise mask": mask}.items():
        if tensor is not None and not _spreads_over(tensor, noise):
            raise RequestError(
                f"The {name} has shape {tuple(tensor.shape)}, and the noise {tuple(noise.shape)}.",
                "They belong to different pictures; make both from one latent.",
            )


def _ignore(evaluation: Evaluation, denoised: torch.Tensor) -> None:
    """Stand in for `on_step` where nobody listens."""


@torch.no_grad()
def sample_latent(
    settings: SampleSettings,
    predict: Predict,
    *,
    sigmas: torch.Tensor,
    noise: torch.Tensor,
    latent_image: torch.Tensor,
    mask: torch.Tensor | None = None,
    on_step: OnStep = _ignore,
) -> torch.Tensor:
    """Return the finished latent, as ComfyUI's KSAMPLER.sample does for a flow model.

    Args:
        settings: sampler and guidance.
        predict: see `denoiser.Predict`.
        sigmas: (steps + 1,), ComfyUI's own list; only the last may be 0.
        noise: (B, C, H, W) start noise, or zeros where an earlier run left its noise in the latent.
        latent_image: on the scale of the model (after process_in); the result has that scale too.
        mask: 1 where the picture is made anew. Dims of latent and mask are those of the noise, or 1.
        on_step: see `samplers.Sampler`; must decide alike on every rank.

    Raises:
        RequestError: inputs that do not fit together, or that hold NaN.
    """
    _check_inputs(sigmas, noise, latent_image, mask)
    sampler = SAMPLERS[settings.sampler]
    sigmas, latent_image = sigmas.to(noise.device, torch.float32), latent_image.to(noise.device, torch.float32)
    start = noise.float()
    inpaint = None if mask is None else Inpaint(mask.to(start.device, torch.float32), latent_image, start)
    x = run_steps(
        sampler,
        Denoiser(predict, FLOW, sigmas * settings.multiplier, settings.cfg, inpaint),
        FLOW.add_noise(latent_image, start, sigmas[0]),
        sigmas,
        on_step,
    )
    return undo_scaling(x, sigmas[-1])


def undo_scaling(x: torch.Tensor, sigma: torch.Tensor) -> torch.Tensor:
    """Return x(sigma) on the scale of a latent; a loop that ends above sigma 0 hands its leftover noise on so."""
    return x / (1.0 - sigma)
