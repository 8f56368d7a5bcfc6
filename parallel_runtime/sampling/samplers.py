"""Samplers under ComfyUI's names and with its results: the table, and the loop over a whole latent.

Those that stages and runs without ComfyUI need most; all others are ComfyUI's own functions (denoising/guider.py).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

import torch

from ..errors import RequestError
from ..said import said
from . import rules
from .steps import Evaluation, Rule, Steps, take_steps

Denoise = Callable[[Evaluation], torch.Tensor]
"""evaluation -> denoised latent like its x."""


OnStep = Callable[[Evaluation, torch.Tensor], None]
"""(evaluation of a step, its denoised latent, the preview), before the step is taken."""


@dataclass(frozen=True)
class Sampler:
    """A method.

    Args:
        rule: what it makes of a step.
    """

    rule: Rule

    def steps(self, x: torch.Tensor, sigmas: torch.Tensor) -> Steps:
        """A run of len(sigmas) - 1 steps over x or over a part of it; all its state is in the generator.

        Args:
            x: latent noised to sigmas[0], or a part of it, (B, C, ...) float32.
            sigmas: (steps + 1,) float32; only the last may be 0.
        """
        return take_steps(self.rule, x, sigmas.to(x.device), sigmas.tolist())

    @torch.no_grad()
    def __call__(self, denoise: Denoise, x: torch.Tensor, sigmas: torch.Tensor, on_step: OnStep) -> torch.Tensor:
        """Run over the whole latent and return x at the last sigma; arguments as for `steps`.

        Args:
            denoise: see `Denoise`.
            on_step: called once a step, before it is taken; what it raises ends the run.
        """
        run = self.steps(x, sigmas)
        try:
            evaluation = next(run)
            while True:
                denoised = denoise(evaluation)
                # Ranks could diverge here: whether on_step raises must be the same on all of them, or those that
                # go on wait in the next collective.
                on_step(evaluation, denoised)
                evaluation = run.send(denoised)
        except StopIteration as finished:
            return finished.value


SAMPLERS: Mapping[str, Sampler] = MappingProxyType({"euler": Sampler(rules.euler), "dpmpp_2m": Sampler(rules.dpmpp_2m)})
SUPPORTED = tuple(SAMPLERS)


def find_sampler(name: str) -> Sampler:
    """Return the sampler of that ComfyUI name.

    Raises:
        RequestError: the pool does not have it; per step it works all the same.
    """
    if name not in SAMPLERS:
        raise RequestError(
            said(
                "Sampler {name} does not run in the workers, which have {supported}.",
                name=repr(name),
                supported=", ".join(SUPPORTED),
            ),
            "Choose one of these, or use KSampler: it runs every sampler per step.",
        )
    return SAMPLERS[name]
