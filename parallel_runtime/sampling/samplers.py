"""Samplers for flow models, under ComfyUI's names and with its results.

One loop serves all of them. A sampler is the rule that takes a step once the denoised latent is known; the rules of
euler, dpmpp_2m and lcm look at one position at a time and hold for any part of a latent.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

import torch

from ..errors import RequestError
from .flow import add_noise
from .noise import NoiseSource

Denoise = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""(x, sigma as a 0-dim tensor on x's device) -> denoised latent like x."""


@dataclass(frozen=True)
class StepState:
    """A step as `on_step` sees it, at the moment of ComfyUI's callback: evaluated, not yet taken.

    Args:
        index: of the step, from 0.
        sigma: noise level of `x`.
        x: latent before the step.
        denoised: what the model makes of it (the preview).
    """

    index: int
    sigma: float
    x: torch.Tensor
    denoised: torch.Tensor


OnStep = Callable[[StepState], None]


@dataclass(frozen=True)
class Step:
    """What a rule knows. Sigmas are 0-dim tensors on x's device: arithmetic with them never waits for the GPU.

    Args:
        sigma, sigma_next: where the step starts and ends.
        ends_clean: sigma_next is 0, nothing but the denoised latent is left.
        previous: sigma and denoised latent of the step before; None on the first.
    """

    sigma: torch.Tensor
    sigma_next: torch.Tensor
    ends_clean: bool
    previous: tuple[torch.Tensor, torch.Tensor] | None
    denoise: Denoise
    noise: NoiseSource | None

    def draw_noise(self, like: torch.Tensor) -> torch.Tensor:
        """Return the next noise, like `like`; only for rules whose sampler says `adds_noise`."""
        assert self.noise is not None, "a sampler that adds noise was run without a noise source"
        return self.noise.draw(like)


Rule = Callable[[Step, torch.Tensor, torch.Tensor], torch.Tensor]
"""(step, x, denoised) -> x at the end of the step."""


def _slope(x: torch.Tensor, denoised: torch.Tensor, sigma: torch.Tensor) -> torch.Tensor:
    return (x - denoised) / sigma


def _euler(step: Step, x: torch.Tensor, denoised: torch.Tensor) -> torch.Tensor:
    """First order along the probability-flow ODE (Karras et al. 2022, algorithm 1 without its correction)."""
    return x + _slope(x, denoised, step.sigma) * (step.sigma_next - step.sigma)


def _heun(step: Step, x: torch.Tensor, denoised: torch.Tensor) -> torch.Tensor:
    """Trapezoid: the slope at both ends, a second evaluation (Karras et al. 2022, algorithm 1); the last is Euler."""
    predicted = _euler(step, x, denoised)
    if step.ends_clean:
        return predicted
    slope = _slope(x, denoised, step.sigma)
    slope_next = _slope(predicted, step.denoise(predicted, step.sigma_next), step.sigma_next)
    return x + (slope + slope_next) / 2 * (step.sigma_next - step.sigma)


def _dpmpp_2m(step: Step, x: torch.Tensor, denoised: torch.Tensor) -> torch.Tensor:
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


def _euler_ancestral(step: Step, x: torch.Tensor, denoised: torch.Tensor) -> torch.Tensor:
    """Rectified-flow form with eta 1: step below sigma_next, then scale and renoise back up to it.

    The part of the signal is 1 - sigma and the part of the noise sigma, so a point at `down` becomes one at
    sigma_next by the ratio of the signals, and by the noise that is then missing in quadrature.
    """
    if step.ends_clean:
        return denoised
    down = step.sigma_next * (1 + (step.sigma_next / step.sigma - 1))
    kept = down / step.sigma
    signal_next, signal_down = 1 - step.sigma_next, 1 - down
    missing = (step.sigma_next**2 - down**2 * signal_next**2 / signal_down**2) ** 0.5
    at_down = kept * x + (1 - kept) * denoised
    return signal_next / signal_down * at_down + step.draw_noise(x) * missing


def _lcm(step: Step, x: torch.Tensor, denoised: torch.Tensor) -> torch.Tensor:
    """Multistep consistency sampling (Luo et al. 2023): take the denoised latent, noise it afresh."""
    return denoised if step.ends_clean else add_noise(denoised, step.draw_noise(x), step.sigma_next)


@dataclass(frozen=True)
class Sampler:
    """A named rule, and the loop that applies it.

    Args:
        name: ComfyUI's.
        rule: takes one step.
        adds_noise: needs a noise source.
    """

    name: str
    rule: Rule
    adds_noise: bool = False

    @torch.no_grad()
    def __call__(
        self, denoise: Denoise, x: torch.Tensor, sigmas: torch.Tensor, *, noise: NoiseSource | None, on_step: OnStep
    ) -> torch.Tensor:
        """Run len(sigmas) - 1 steps and return x at the last sigma.

        Args:
            denoise: see `Denoise`; two calls a step for heun, one for the others.
            x: latent noised to sigmas[0], (B, C, H, W) float32.
            sigmas: (steps + 1,) float32; only the last may be 0.
            noise: read by the samplers that add noise; None will do for the others.
            on_step: called once a step, before it is taken; what it raises ends the run.
        """
        levels = sigmas.tolist()
        on_device = sigmas.to(x.device)
        previous = None
        for index, level in enumerate(levels[:-1]):
            sigma = on_device[index]
            denoised = denoise(x, sigma)
            # Ranks could diverge here: whether on_step raises must be the same on all of them, or those that go on
            # wait in the next collective.
            on_step(StepState(index, level, x, denoised))
            step = Step(sigma, on_device[index + 1], levels[index + 1] == 0, previous, denoise, noise)
            x = self.rule(step, x, denoised)
            previous = sigma, denoised
        return x


SAMPLERS: Mapping[str, Sampler] = MappingProxyType(
    {
        sampler.name: sampler
        for sampler in (
            Sampler("euler", _euler),
            Sampler("euler_ancestral", _euler_ancestral, adds_noise=True),
            Sampler("heun", _heun),
            Sampler("dpmpp_2m", _dpmpp_2m),
            Sampler("lcm", _lcm, adds_noise=True),
            # In ComfyUI ddim is euler, told apart only by what it puts under a mask.
            Sampler("ddim", _euler),
        )
    }
)
SUPPORTED = tuple(SAMPLERS)


def find_sampler(name: str) -> Sampler:
    """Return the sampler of that ComfyUI name.

    Raises:
        RequestError: the pool does not have it; per step it works all the same.
    """
    if name not in SAMPLERS:
        raise RequestError(
            f"Sampler {name!r} does not run in the pool, which has {', '.join(SUPPORTED)}.",
            "Choose one of these, or use KSampler: it runs every sampler per step.",
        )
    return SAMPLERS[name]
