"""The timesteps that ComfyUI's model makes of a sampler's, as shares of it. No ComfyUI needed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from .transformer_call import TransformerCall

FIRST = ""
"""Name of the call's timestep, beside those of arguments that are timesteps, too."""
_BESIDE = ("a_timestep",)
"""Arguments of the network that are timesteps."""
Timesteps = dict[int, dict[str, torch.Tensor]]
"""Of each CFG branch, by name."""


def read_timesteps(calls: Sequence[TransformerCall]) -> Timesteps:
    """Those that the calls of one evaluation have."""
    found: Timesteps = {}
    for call in calls:
        named = {FIRST: call.timestep} | {
            name: call.conditioning[name] for name in _BESIDE if name in call.conditioning
        }
        count = len(call.cond_or_uncond)
        for position, index in enumerate(call.cond_or_uncond):
            found[index] = {name: each.chunk(count)[position] for name, each in named.items()}
    return found


def are_plain(found: Timesteps, timestep: torch.Tensor) -> bool:
    """Whether there is none but the sampler's own.

    Args:
        timestep: (B,) float32.
    """
    return all(named.keys() == {FIRST} and _same(named[FIRST], timestep) for named in found.values())


def find_shares(
    first: tuple[torch.Tensor, Timesteps], second: tuple[torch.Tensor, Timesteps]
) -> Mapping[int, dict[str, torch.Tensor]] | None:
    """What each timestep is of the sampler's, from two evaluations; None where it is no share that stays the same.

    Args:
        first, second: the sampler's timestep (B,) float32, and what the model made of it.
    """
    (timestep, found), (_, others) = first, second
    shares: dict[int, dict[str, torch.Tensor]] = {}
    for index, named in found.items():
        for name, value in named.items():
            other = others.get(index, {}).get(name)
            if other is None or value.dtype != torch.float32 or other.shape != value.shape:
                return None
            share = value / _along(timestep, value)
            # Masks are of the model's type: where that is shorter, a quotient is a rounding away from them.
            for candidate in (share.bfloat16().float(), share.half().float(), share):
                if all(
                    _same(candidate * _along(at, value), made) for at, made in ((timestep, value), (second[0], other))
                ):
                    shares.setdefault(index, {})[name] = candidate
                    break
            else:
                return None
    return shares


def _along(timestep: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    return timestep.reshape(-1, *[1] * (value.ndim - 1))


def _same(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.dtype == other.dtype and one.shape == other.shape and torch.equal(one, other)
