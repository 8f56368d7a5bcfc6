"""A sampling run as a generator: it asks for denoised latents one by one, and returns the finished latent.

Whoever drives it decides where and when each evaluation happens: one loop over the whole latent, or one generator for
each part of it. For the latter a method must hold for any part of a latent, looking at one position at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from dataclasses import dataclass

import torch

from .noise import Noise
from .prediction import Prediction


@dataclass(frozen=True)
class Evaluation:
    """A denoised latent that a run asks for.

    Args:
        x: what to denoise, (B, C, ...) float32.
        sigma: noise level of `x`, 0-dim, on x's device: arithmetic with it never waits for the GPU.
        index: of the step, from 0.
        level: index of `sigma` in the run's list; `index` or, for the second evaluation of a step, `index + 1`.
        first: of its step: where progress is told and a cancel is heard.
    """

    x: torch.Tensor
    sigma: torch.Tensor
    index: int
    level: int
    first: bool


Steps = Generator[Evaluation, torch.Tensor, torch.Tensor]
"""Yields evaluations, is sent the denoised latent of each, returns x at the last sigma."""


@dataclass(frozen=True)
class Run:
    """What a method knows besides x.

    Args:
        sigmas: (steps + 1,) float32 on x's device; only the last may be 0.
        levels: the same on the host, for decisions and for coefficients.
        prediction: which noise path x stands on.
        noise: for methods that add it.
    """

    sigmas: torch.Tensor
    levels: torch.Tensor
    prediction: Prediction
    noise: Noise | None

    @property
    def count(self) -> int:
        """Number of steps."""
        return len(self.levels) - 1

    def ends_clean(self, index: int) -> bool:
        """Whether nothing but the denoised latent is left after this step."""
        return self.levels[index + 1].item() == 0

    def evaluate(self, x: torch.Tensor, index: int, level: int | None = None) -> Evaluation:
        """The evaluation of step `index`; with `level`, its second one."""
        at = index if level is None else level
        return Evaluation(x, self.sigmas[at], index, at, first=level is None)

    def draw_noise(self, like: torch.Tensor) -> torch.Tensor:
        """Return the next noise, like `like`; only for methods whose sampler says `adds_noise`."""
        assert self.noise is not None, "a sampler that adds noise was run without a noise source"
        return self.noise.draw(like)


@dataclass(frozen=True)
class Step:
    """A step whose denoised latent is known.

    Args:
        run: the run that it belongs to.
        index: from 0.
        sigma, sigma_next: where it starts and ends, 0-dim on x's device.
        previous: sigma and denoised latent of the step before; None on the first.
    """

    run: Run
    index: int
    sigma: torch.Tensor
    sigma_next: torch.Tensor
    previous: tuple[torch.Tensor, torch.Tensor] | None

    @property
    def ends_clean(self) -> bool:
        """See `Run.ends_clean`."""
        return self.run.ends_clean(self.index)


Method = Callable[[Run, torch.Tensor], Steps]
"""(run, x at the first sigma) -> the run as a generator."""

Rule = Callable[[Step, torch.Tensor, torch.Tensor], torch.Tensor]
"""(step, x, denoised) -> x at the end of the step."""


def stepwise(rule: Rule) -> Method:
    """The method of a rule that needs one evaluation a step and remembers at most the one before."""

    def method(run: Run, x: torch.Tensor) -> Steps:
        previous = None
        for index in range(run.count):
            denoised = yield run.evaluate(x, index)
            step = Step(run, index, run.sigmas[index], run.sigmas[index + 1], previous)
            x = rule(step, x, denoised)
            previous = step.sigma, denoised
        return x

    return method
