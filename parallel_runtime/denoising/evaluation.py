"""Evaluations of a loop: the CFG branches of its request at a latent and a timestep, as calls of the transformer."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any

import torch

from ..mesh.agreement import of_first_rank
from ..requests.conditioning import BRANCHES, OPTIONS, Conditioning
from ..requests.patches import CARRIED, REPLACED
from ..sampling.own_timesteps import FIRST, OwnTimestep
from .predict import Call, Predictor

Told = Callable[[int, torch.Tensor], None]
"""(index of a step, its denoised latent), once a step; what it raises ends the run, on all ranks."""


@dataclass(frozen=True)
class Asked:
    """One branch of an evaluation.

    Args:
        branch: its place in the request.
        index: what ComfyUI calls it in this evaluation (cond_or_uncond).
        arguments: names of those of the call that are left.
        options: for the inside of ComfyUI's own network.
        replaced: what stands for parts of it: (kind, key, patch) each.
    """

    branch: int
    index: int
    arguments: Set[str]
    options: Mapping[str, Any]
    replaced: Sequence[tuple[str, Any, Any]]


@dataclass(frozen=True)
class Evaluation:
    """Called with (latent, timestep) for all branches; see `sampling.denoiser.Predict`.

    Args:
        branches: conditionings, in the order of the request.
        own_timesteps: of each branch, by name.
        see: latent -> what the transformer sees, for each branch.
        unlike: the ranks' devices are of several kinds. The same on all ranks: it leads to collectives.
    """

    predictor: Predictor
    branches: Sequence[Conditioning]
    own_timesteps: Sequence[Mapping[str, OwnTimestep]]
    see: Callable[[torch.Tensor], Sequence[torch.Tensor]]
    unlike: bool

    def __call__(self, x: torch.Tensor, timestep: torch.Tensor) -> list[torch.Tensor]:
        return self._predict(x, timestep, list(enumerate(self.branches)))

    def some(self, x: torch.Tensor, timestep: torch.Tensor, asked: Sequence[Asked]) -> list[torch.Tensor]:
        """An output for each, as ComfyUI has them evaluated."""
        return self._predict(x, timestep, [(each.branch, _inside(self.branches[each.branch], each)) for each in asked])

    def agreed(self, tensor: torch.Tensor) -> torch.Tensor:
        """The same bytes on all ranks: the first one's."""
        return of_first_rank(tensor, self.predictor.mesh) if self.unlike else tensor

    def _predict(
        self, x: torch.Tensor, timestep: torch.Tensor, branches: Sequence[tuple[int, Conditioning]]
    ) -> list[torch.Tensor]:
        inputs = self.see(self.agreed(x))
        calls = [
            _call(inputs[place], timestep, conditioning, self.own_timesteps[place]) for place, conditioning in branches
        ]
        return [output.float() for output in self.predictor(calls)]


def _inside(conditioning: Conditioning, asked: Asked) -> Conditioning:
    """What ComfyUI's own network is told of an evaluation; diffusers' reads no options."""
    arguments = {name: value for name, value in conditioning.arguments.items() if name in asked.arguments}
    options: dict[str, Any] | None = arguments.get(OPTIONS)
    if options is not None and (options.get(BRANCHES) != [asked.index] or asked.options or asked.replaced):
        arguments[OPTIONS] = {**options, **asked.options, BRANCHES: [asked.index]}
        if asked.replaced:
            carried = options.get(CARRIED, {})
            arguments[OPTIONS][CARRIED] = {**carried, REPLACED: [*carried.get(REPLACED, ()), *asked.replaced]}
    elif len(arguments) == len(conditioning.arguments):
        return conditioning
    return Conditioning(arguments, conditioning.shared)


def _call(
    x: torch.Tensor, timestep: torch.Tensor, conditioning: Conditioning, own_timesteps: Mapping[str, OwnTimestep]
) -> Call:
    """The call of one branch at a timestep (B,) of the loop."""
    made = {name: own.at(timestep) for name, own in own_timesteps.items()}
    first = made.pop(FIRST, timestep)
    if made:
        conditioning = Conditioning({**conditioning.arguments, **made}, conditioning.shared)
    return Call(x, first, conditioning)
