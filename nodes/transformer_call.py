"""The call `diffusion_model(x, timestep, context, **extras)` as data, read from any family's own signature."""

from __future__ import annotations

import inspect
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from parallel_runtime.requests.conditioning import Shared
from parallel_runtime.requests.requests import Scalar

_NOT_CONDITIONING = ("control", "transformer_options")


@dataclass(frozen=True)
class TransformerCall:
    """One call, as ComfyUI batched it.

    Args:
        x: (branches * B, C, ...) latent in the model's dtype, extra input channels appended; a list of such where
            a model has several (video and audio).
        timestep: (branches * B,) float32, as the model's sampling converted it.
        conditioning: context and the family's extras, None left out.
        control: ControlNet outputs, or None.
        options: ComfyUI's transformer_options.
    """

    x: Any
    timestep: torch.Tensor
    conditioning: Mapping[str, Any]
    control: Any
    options: Mapping[str, Any]

    @property
    def cond_or_uncond(self) -> Sequence[int]:
        """Branch of each chunk of the batch: 0 positive, 1 negative."""
        return self.options.get("cond_or_uncond", (0,))


def read_call(
    signature: inspect.Signature, args: Sequence[Any], kwargs: Mapping[str, Any], shared: Container[str] = ()
) -> TransformerCall:
    """Name the arguments of a call by the signature of the family's own `_forward` (without self).

    Families differ in names and order, but x and the timestep come first in all of them.

    Args:
        shared: names of arguments that are one for all rows of the batch, whatever their shape.
    """
    bound = signature.bind(*args, **kwargs)
    arguments: dict[str, Any] = {}
    for name, value in bound.arguments.items():
        if signature.parameters[name].kind is inspect.Parameter.VAR_KEYWORD:
            arguments |= value
        else:
            arguments[name] = value
    x, timestep = (arguments.pop(name) for name in list(signature.parameters)[:2])
    control, options = (arguments.pop(name, None) for name in _NOT_CONDITIONING)
    conditioning = {
        name: Shared(value) if name in shared and not isinstance(value, Scalar) else value
        for name, value in arguments.items()
        if value is not None
    }
    return TransformerCall(x, timestep, conditioning, control, options or {})
