"""Samplers under ComfyUI's names and with its results: the table, and the loop over a whole latent."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

import torch

from ..errors import RequestError
from ..said import said
from . import rules
from .noise import Noise
from .prediction import FLOW, Prediction
from .steps import Evaluation, Method, Run, Steps, stepwise
from .uni_pc import END, uni_pc, uni_pc_bh2

Denoise = Callable[[Evaluation], torch.Tensor]
"""evaluation -> denoised latent like its x."""


OnStep = Callable[[Evaluation, torch.Tensor], None]
"""(first evaluation of a step, its denoised latent, the preview), before the step is taken."""


@dataclass(frozen=True)
class Sampler:
    """A named method.

    Args:
        name: ComfyUI's.
        method: what it does, as a generator.
        adds_noise: needs a source of noise.
        end: where a run ends whose last sigma is 0.
    """

    name: str
    method: Method
    adds_noise: bool = False
    end: float = 0.0

    def end_sigma(self, sigmas: torch.Tensor) -> torch.Tensor:
        """Sigma of the latent that a run over these sigmas returns, 0-dim."""
        return sigmas[-1] if sigmas[-1] != 0 else sigmas.new_tensor(self.end)

    def steps(self, x: torch.Tensor, sigmas: torch.Tensor, noise: Noise | None, prediction: Prediction = FLOW) -> Steps:
        """A run of len(sigmas) - 1 steps over x or over a part of it; all its state is in the generator.

        Every run over the same sigmas asks for the same sequence of steps and levels.

        Args:
            x: latent noised to sigmas[0], or a part of it, (B, C, ...) float32.
            sigmas: (steps + 1,) float32; only the last may be 0.
            noise: read by samplers that add noise; None will do for the others.
            prediction: which noise path x stands on.
        """
        return self.method(Run(sigmas.to(x.device), sigmas.cpu(), prediction, noise), x)

    @torch.no_grad()
    def __call__(
        self,
        denoise: Denoise,
        x: torch.Tensor,
        sigmas: torch.Tensor,
        *,
        noise: Noise | None,
        on_step: OnStep,
        prediction: Prediction = FLOW,
    ) -> torch.Tensor:
        """Run over the whole latent and return x at the last sigma; arguments as for `steps`.

        Args:
            denoise: see `Denoise`.
            on_step: called once a step, before it is taken; what it raises ends the run.
        """
        run = self.steps(x, sigmas, noise, prediction)
        try:
            evaluation = next(run)
            while True:
                denoised = denoise(evaluation)
                if evaluation.first:
                    # Ranks could diverge here: whether on_step raises must be the same on all of them, or those that
                    # go on wait in the next collective.
                    on_step(evaluation, denoised)
                evaluation = run.send(denoised)
        except StopIteration as finished:
            return finished.value


SAMPLERS: Mapping[str, Sampler] = MappingProxyType(
    {
        sampler.name: sampler
        for sampler in (
            Sampler("euler", stepwise(rules.euler)),
            Sampler("euler_ancestral", stepwise(rules.euler_ancestral), adds_noise=True),
            Sampler("heun", rules.heun),
            Sampler("dpmpp_2m", stepwise(rules.dpmpp_2m)),
            Sampler("ddpm", stepwise(rules.ddpm), adds_noise=True),
            Sampler("lcm", stepwise(rules.lcm), adds_noise=True),
            # In ComfyUI ddim is euler, told apart only by what it puts under a mask.
            Sampler("ddim", stepwise(rules.euler)),
            Sampler("uni_pc", uni_pc, end=END),
            Sampler("uni_pc_bh2", uni_pc_bh2, end=END),
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
            said(
                "Sampler {name} does not run in the workers, which have {supported}.",
                name=repr(name),
                supported=", ".join(SUPPORTED),
            ),
            "Choose one of these, or use KSampler: it runs every sampler per step.",
        )
    return SAMPLERS[name]
