"""ComfyUI's own samplers over a denoiser of ours. ComfyUI must be importable (host_code.py).

They ask their model for denoised latents, and read its model sampling; noise they draw from the request's seed, on the
device of the latent. So ranks that begin with the same bytes take the same steps.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from ...errors import RequestError
from ...requests.requests import Scalar
from ...said import said
from .live_guider import GuidedModel

_Told = Callable[[int, torch.Tensor], None]


def make_sampling(
    bases: Sequence[str], values: Mapping[str, Scalar], tensors: Mapping[str, torch.Tensor]
) -> torch.nn.Module:
    """A model sampling of ComfyUI's.

    Args:
        bases: classes of `comfy.model_sampling`.
        values, tensors: what it holds.

    Raises:
        RequestError: this ComfyUI has no such class.
    """
    code = importlib.import_module("comfy.model_sampling")
    kinds: list[Any] = [getattr(code, name, None) for name in bases]
    for name, kind in zip(bases, kinds, strict=True):
        if not isinstance(kind, type) or kind.__module__ != code.__name__:
            raise RequestError(
                said("The ComfyUI of the workers has no model sampling {name}.", name=name), said("Update it.")
            )
    joined: Any = type("ModelSampling", tuple(kinds), {})
    made: Any = joined.__new__(joined)
    nn.Module.__init__(made)
    for name, value in values.items():
        setattr(made, name, value)
    for name, tensor in tensors.items():
        made.register_buffer(name, tensor)
    return made


class HostSampler:
    """A sampler of ComfyUI's list.

    Args:
        name: there.
        options: arguments of its function.

    Raises:
        RequestError: this ComfyUI does not have it.
    """

    def __init__(self, name: str, options: Mapping[str, Scalar]):
        code = importlib.import_module("comfy.samplers")
        if name not in code.SAMPLER_NAMES:
            raise RequestError(said("The ComfyUI of the workers has no sampler {name}.", name=name), said("Update it."))
        self._function = code.sampler_object(name).sampler_function
        self._options = dict(options)

    def run(
        self,
        model: GuidedModel,
        sampling: Any,
        x: torch.Tensor,
        sigmas: torch.Tensor,
        *,
        seed: int,
        guidance: Mapping[str, Any],
        on_step: _Told,
    ) -> torch.Tensor:
        """Return the finished latent as ComfyUI's KSAMPLER does.

        Args:
            sampling: of the model.
            x: noised to sigmas[0].
            guidance: entries of `model_options`; see live_guidance.py.
            on_step: called once a step; what it raises ends the run.
        """
        sigmas = sigmas.clone()  # UniPC writes into them
        latent = self._function(
            model,
            x.clone(),
            sigmas,
            extra_args={"model_options": model.options(guidance), "seed": seed},
            callback=lambda state: on_step(int(state["i"]), state["denoised"]),
            disable=True,
            **self._options,
        )
        return sampling.inverse_noise_scaling(sigmas[-1], latent)
