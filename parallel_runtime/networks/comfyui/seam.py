"""Where a call leaves ComfyUI's process and enters the network in a rank, and the sigmas that it goes without."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from ..tables.comfyui import find_network


def seam_of(network: nn.Module) -> str:
    """Name of the method: `_forward`, behind the wrappers of other nodes, where a network has one. What some do around
    it in `forward` (MiniMax H3 rescales the audio) ComfyUI's process does already, but for a loop in the ranks."""
    return "_forward" if hasattr(network, "_forward") else "forward"


IN_LOOP = "in_loop"  # argument of calls that a loop in the ranks makes of a network which rescales


def enter(network: nn.Module, x: Any, timestep: Tensor, arguments: Mapping[str, Any], in_loop: bool = False) -> Any:
    """Call the network at the seam, `in_loop` with what it does around it; some want to be told what is None, too."""
    method = getattr(network, "forward" if in_loop else seam_of(network))
    taken = inspect.signature(method).parameters.values()
    required = [each.name for each in taken if each.default is each.empty and each.kind is each.POSITIONAL_OR_KEYWORD]
    return method(x, timestep, **{**dict.fromkeys(required[2:]), **arguments})


RUN_SIGMAS = "run_sigmas"  # argument of a call: sigmas of the run (N,), and the timesteps of them
_CALL, _RUN = "sigmas", "sample_sigmas"  # ComfyUI's transformer options: (B,) of this call, (N,) of the run


def reads_sigmas(network: nn.Module) -> bool:
    """Whether it looks at these options."""
    data = find_network(type(network))
    return data is not None and data.sigmas_with != "" and getattr(network, data.sigmas_with, None) is not None


def tabulate(options: Mapping[str, Any], timestep_of: Callable[[Tensor], Tensor]) -> list[Tensor] | None:
    """The argument that says what the sigmas of a run are; None where nobody knows. `timestep_of` is the model
    sampling's rule; a sigma of 0, which is never evaluated, has no place in some."""
    sigmas = options.get(_RUN)
    if sigmas is None:
        return None
    return [sigmas, torch.where(sigmas > 0, timestep_of(sigmas).float(), 0.0)]


def look_up(table: list[Tensor], timestep: Tensor) -> dict[str, Tensor]:
    """ComfyUI's options of this call. Between the run's sigmas (samplers of second order) it is none of them."""
    sigmas, timesteps = table
    here = timesteps == timestep.flatten()[0]
    sigma = torch.where(here.any(), sigmas[here.float().argmax()], torch.nan)
    return {_CALL: sigma.reshape(1), _RUN: sigmas}
