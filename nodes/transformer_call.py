"""The call `diffusion_model(x, timestep, context, **extras)` as data, and what of it is each branch's."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from parallel_runtime.requests.comfyui_code import Scalar
from parallel_runtime.requests.conditioning import BRANCHES, OPTIONS, Shared
from parallel_runtime.sampling.own_timesteps import BESIDE, FIRST


@dataclass(frozen=True)
class TransformerCall:
    """One call, as ComfyUI batched it."""

    x: Any  # (branches * B, C, ...) latent, extra input channels appended; a list where a model has video and audio
    timestep: torch.Tensor  # (branches * B,) float32, as the model's sampling converted it
    conditioning: Mapping[str, Any]  # context and the family's extras, None left out
    control: Any  # ControlNet outputs, or None
    options: Mapping[str, Any]  # ComfyUI's transformer_options

    @property
    def cond_or_uncond(self) -> Sequence[int]:
        """Branch of each chunk of the batch: 0 positive, 1 negative."""
        return self.options.get("cond_or_uncond", (0,))


def read_call(
    signature: inspect.Signature, args: Sequence[Any], kwargs: Mapping[str, Any], shared: Container[str] = ()
) -> TransformerCall:
    """Name the arguments of a call by the signature of the family's own `_forward` (without self): x and the timestep
    come first in all of them. `shared` are one for all rows of the batch, whatever their shape."""
    arguments = signature.bind(*args, **kwargs).arguments
    for name, parameter in signature.parameters.items():
        if parameter.kind is inspect.Parameter.VAR_KEYWORD:
            arguments |= arguments.pop(name, {})
    x, timestep = (arguments.pop(name) for name in list(signature.parameters)[:2])
    control, options = (arguments.pop(name, None) for name in ("control", "transformer_options"))
    conditioning = {
        name: Shared(value) if name in shared and not isinstance(value, Scalar) else value
        for name, value in arguments.items()
        if value is not None
    }
    return TransformerCall(x, timestep, conditioning, control, options or {})


def split_branches(calls: Sequence[TransformerCall]) -> dict[int, dict[str, Any]]:
    """The conditioning of each branch alone, in the order of their indices, from batched calls."""
    branches = {}
    for index, call, part_of in sorted(_branches_of(calls), key=lambda each: each[0]):
        part = {name: part_of(value) for name, value in call.conditioning.items()}
        if OPTIONS in part:
            part[OPTIONS] = Shared({**part[OPTIONS].value, BRANCHES: [index]})
        branches[index] = part
    return branches


def split_extra_channels(calls: Sequence[TransformerCall], channels: int) -> dict[int, torch.Tensor]:
    """What follows the latent's channels in x (FLUX Fill, Canny and Depth), by branch; the same at every step."""
    x = {index: part_of(call.x) for index, call, part_of in _branches_of(calls)}
    return {index: x[index][:, channels:] for index in sorted(x) if x[index].shape[1] > channels}


def split_timesteps(calls: Sequence[TransformerCall]) -> dict[int, dict[str, torch.Tensor]]:
    """Of each branch, by name: its timestep, and arguments that are timesteps, too."""
    found: dict[int, dict[str, torch.Tensor]] = {}
    for index, call, part_of in _branches_of(calls):
        named = {FIRST: call.timestep} | {name: call.conditioning[name] for name in BESIDE if name in call.conditioning}
        found[index] = {name: part_of(each) for name, each in named.items()}
    return found


def _branches_of(calls: Sequence[TransformerCall]) -> Iterator[tuple[int, TransformerCall, Callable[[Any], Any]]]:
    """Index of a branch, its call, and what gives its part of an argument there."""
    for call in calls:
        for position, index in enumerate(call.cond_or_uncond):
            yield index, call, partial(_chunk, len(call.cond_or_uncond), position)


def _chunk(count: int, position: int, value: Any) -> Any:
    if isinstance(value, list):
        return [_chunk(count, position, item) for item in value]
    return value.chunk(count)[position] if isinstance(value, torch.Tensor) else value
