"""The sigma of a call for networks that ask for it: a table of the run's, so that steps differ in their timestep alone.

ComfyUI tells a network the sigma of each call among the transformer options. If it travelled there, each step would
have a conditioning of its own, and the text would be sent with every one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from .networks import find_network

RUN_SIGMAS = "run_sigmas"
"""Argument of a call: sigmas of the run (N,), and the timesteps of them."""
_CALL, _RUN = "sigmas", "sample_sigmas"
"""ComfyUI's transformer options: (B,) of this call, (N,) of the run."""


def reads_sigmas(network: nn.Module) -> bool:
    """Whether it looks at these options."""
    data = find_network(type(network))
    return data is not None and data.sigmas_with != "" and getattr(network, data.sigmas_with, None) is not None


def tabulate(
    options: Mapping[str, Any], timestep_of: Callable[[torch.Tensor], torch.Tensor]
) -> list[torch.Tensor] | None:
    """The argument that says what the sigmas of a run are; None where nobody knows.

    Args:
        timestep_of: the model sampling's rule; a sigma of 0, which is never evaluated, has no place in some.
    """
    sigmas = options.get(_RUN)
    if sigmas is None:
        return None
    return [sigmas, torch.where(sigmas > 0, timestep_of(sigmas).float(), 0.0)]


def look_up(table: list[torch.Tensor], timestep: torch.Tensor) -> dict[str, torch.Tensor]:
    """ComfyUI's options of this call. Between the run's sigmas (samplers of second order) it is none of them."""
    sigmas, timesteps = table
    here = timesteps == timestep.flatten()[0]
    sigma = torch.where(here.any(), sigmas[here.float().argmax()], torch.nan)
    return {_CALL: sigma.reshape(1), _RUN: sigmas}
