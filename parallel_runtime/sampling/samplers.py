"""A sampling run as a generator: it asks for denoised latents one by one, and returns the finished latent.

Whoever drives it decides where and when each evaluation happens: one loop over the whole latent, or one generator for
each part of it. For the latter a rule must hold for any part of a latent, looking at one position at a time.

Samplers go by ComfyUI's names and have its results: those that stages and runs without ComfyUI need most; all others
are ComfyUI's own functions (denoising/host_denoise.py).
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass
from types import MappingProxyType

import torch
from torch import Tensor


@dataclass(frozen=True)
class Evaluation:
    """That a run asks for the denoised latent of `x` (B, C, ...) float32, at step `index`, from 0; `sigma` is its noise
    level, 0-dim, on x's device: arithmetic with it never waits for the GPU."""

    x: Tensor
    sigma: Tensor
    index: int


Steps = Generator[Evaluation, Tensor, Tensor]
"""Yields evaluations, is sent the denoised latent of each, returns x at the last sigma."""


Before = tuple[Tensor, Tensor] | None
"""Sigma and denoised latent of the step before; None on the first step, and where nothing but the denoised latent is
left at its end."""
Rule = Callable[[Tensor, Tensor, Tensor, Tensor, Before], Tensor]
"""(x, denoised, sigma, sigma_next, before) -> x at the end of a step from sigma to sigma_next, 0-dim on x's device."""
OnStep = Callable[[Evaluation, Tensor], None]
"""(evaluation of a step, its denoised latent), before the step is taken; what it raises ends the run."""


def take_steps(rule: Rule, x: Tensor, sigmas: Tensor) -> Steps:
    """A run of the steps between sigmas, float32, of which only the last may be 0, over x (B, C, ...) float32, a latent
    noised to the first or a part of it; all its state is in the generator."""
    levels, sigmas = sigmas.tolist(), sigmas.to(x.device)  # the host waits for sigmas here, and in no step
    before = None
    for index, level in enumerate(levels[1:]):
        denoised = yield Evaluation(x, sigmas[index], index)
        x = rule(x, denoised, sigmas[index], sigmas[index + 1], before if level else None)
        before = sigmas[index], denoised
    return x


@torch.no_grad()
def run_steps(
    rule: Rule, denoise: Callable[[Evaluation], Tensor], x: Tensor, sigmas: Tensor, on_step: OnStep
) -> Tensor:
    """Run over the whole latent and return x at the last sigma; arguments as for `take_steps`."""
    run = take_steps(rule, x, sigmas)
    try:
        evaluation = next(run)
        while True:
            denoised = denoise(evaluation)
            # Ranks could diverge here: whether on_step raises must be the same on all of them, or those that go on
            # wait in the next collective.
            on_step(evaluation, denoised)
            evaluation = run.send(denoised)
    except StopIteration as finished:
        return finished.value


def euler(x: Tensor, denoised: Tensor, sigma: Tensor, sigma_next: Tensor, before: Before) -> Tensor:
    """First order along the probability-flow ODE (Karras et al. 2022, algorithm 1 without its correction)."""
    return x + (x - denoised) / sigma * (sigma_next - sigma)


def dpmpp_2m(x: Tensor, denoised: Tensor, sigma: Tensor, sigma_next: Tensor, before: Before) -> Tensor:
    """DPM-Solver++(2M), Lu et al. 2022, in the log of sigma; first order at the first step and on the way to 0."""
    log_sigma, log_next = sigma.log(), sigma_next.log()
    towards = denoised
    if before is not None:
        previous_sigma, previous_denoised = before
        reach = (previous_sigma.log() - log_sigma) / (log_sigma - log_next)
        weight = 1 / (2 * reach)
        towards = (1 + weight) * denoised - weight * previous_denoised
    # exp(log) and expm1 rather than sigma_next / sigma: the last bit is then ComfyUI's as well.
    return log_next.exp() / log_sigma.exp() * x - (log_next - log_sigma).expm1() * towards


SAMPLERS: Mapping[str, Rule] = MappingProxyType({"euler": euler, "dpmpp_2m": dpmpp_2m})
SUPPORTED = tuple(SAMPLERS)
