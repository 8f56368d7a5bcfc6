"""Timesteps that a model makes of the loop's: under a noise mask one for each token, one for sound beside a video, one
that counts up where the loop counts down, one of a shorter type.

Each is a share of the loop's, counted from 0 or from 1, and the shares stay the same over a run: so two evaluations
show them, and ranks make them again at any timestep.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

FIRST = ""  # name of the call's timestep, beside those of arguments that are timesteps, too
BESIDE = ("a_timestep",)  # arguments of the network that are timesteps
Timesteps = Mapping[int, Mapping[str, torch.Tensor]]  # of each CFG branch, by name


@dataclass(frozen=True)
class OwnTimestep:
    """A share, (B, ...), of the loop's timestep in the type that the model gives it, and what it is counted from."""

    share: torch.Tensor
    begin: float

    def at(self, timestep: torch.Tensor) -> torch.Tensor:
        """The model's, of the loop's (B,) float32."""
        return (self.begin + self.share.float() * _along(timestep, self.share)).to(self.share.dtype)


def are_plain(found: Timesteps, timestep: torch.Tensor) -> bool:
    """Whether there is none but the loop's own, (B,) float32."""
    return all(named.keys() == {FIRST} and _same(named[FIRST], timestep) for named in found.values())


def find_own_timesteps(
    first: tuple[torch.Tensor, Timesteps], second: tuple[torch.Tensor, Timesteps]
) -> Mapping[int, Mapping[str, OwnTimestep]] | None:
    """What each timestep is of the loop's; None where one of them is no share of it. `first` and `second` are the
    loop's timestep (B,) float32 of an evaluation, and what the model made of it."""
    found: dict[int, dict[str, OwnTimestep]] = {}
    for index, named in first[1].items():
        for name, value in named.items():
            other = second[1].get(index, {}).get(name)
            own = None if other is None else _find((first[0], value), (second[0], other))
            if own is None:
                return None
            found.setdefault(index, {})[name] = own
    return found


def _find(first: tuple[torch.Tensor, torch.Tensor], second: tuple[torch.Tensor, torch.Tensor]) -> OwnTimestep | None:
    timestep, value = first
    for begin in (0.0, 1.0):
        share = (value.float() - begin) / _along(timestep, value)
        # Masks are of the model's type: where that is shorter, a quotient is a rounding away from them.
        for rounded in (share.bfloat16(), share.half(), share):
            own = OwnTimestep(rounded.to(value.dtype), begin)
            if all(_same(own.at(at), made) for at, made in (first, second)):
                return own
    return None


def _along(timestep: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    return timestep.reshape(-1, *[1] * (value.ndim - 1))


def _same(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.dtype == other.dtype and one.shape == other.shape and torch.equal(one, other)
