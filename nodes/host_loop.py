"""What a loop of ComfyUI's own samplers needs in the ranks, as data; what is no such data, named."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import comfy.model_sampling
import torch
from torch import nn

from parallel_runtime.requests.requests import Scalar
from parallel_runtime.said import Said, said

from .known_samplers import KnownSampler

_OF_A_CLASS = {"__module__", "__doc__", "__qualname__", "__static_attributes__", "__firstlineno__"}
_OF_EVERY_MODULE = frozenset(vars(nn.Module()))


@dataclass(frozen=True)
class SamplingData:
    """A model sampling of ComfyUI's: names of the classes that it is made of, and what it holds."""

    bases: tuple[str, ...]
    values: dict[str, Scalar]
    tensors: dict[str, torch.Tensor]


def read_sampling(sampling: Any) -> SamplingData | None:
    """A model sampling as data; None for one with rules of its own."""
    kind = type(sampling)
    joined = vars(kind).keys() <= _OF_A_CLASS  # ComfyUI joins two classes for each model
    bases = kind.__bases__ if joined else (kind,)
    if any(getattr(comfy.model_sampling, base.__name__, None) is not base for base in bases):
        return None
    held = {name: value for name, value in vars(sampling).items() if name not in _OF_EVERY_MODULE}
    tensors = {name: value for name, value in held.items() if isinstance(value, torch.Tensor)}
    tensors |= {name: value for name, value in sampling._buffers.items() if value is not None}
    values = {name: value for name, value in held.items() if isinstance(value, Scalar)}
    if sampling._parameters or sampling._modules or held.keys() - tensors.keys() - values.keys():
        return None
    return SamplingData(tuple(base.__name__ for base in bases), values, tensors)


def host_obstacles(known: KnownSampler, sampling: Any) -> list[Said]:
    """Name what of a loop by ComfyUI's own code is no data."""
    options = known.options
    found = []
    # Samplers take what they churn up from the process's own random numbers.
    if options.get("s_churn") or not all(isinstance(value, Scalar) for value in options.values()):
        found.append(said("the sampler {name}", name=known.title))
    if read_sampling(sampling) is None:
        found.append(said("the model sampling {name}", name=type(sampling).__name__))
    return found
