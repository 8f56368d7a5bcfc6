"""Where a call leaves ComfyUI's process and enters the network in a rank: the same method on both sides."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn


def seam_of(network: nn.Module) -> str:
    """Name of the method: `_forward`, behind the wrappers of other nodes, where a network has one.

    Some networks do more around it in `forward` (MiniMax H3 rescales the audio), which ComfyUI's process does already.
    """
    return "_forward" if hasattr(network, "_forward") else "forward"


def enter(network: nn.Module, x: Any, timestep: torch.Tensor, arguments: Mapping[str, Any]) -> Any:
    """Call the network at the seam.

    Args:
        arguments: without those that are None, which some networks want to be told.
    """
    method = getattr(network, seam_of(network))
    required = [
        name
        for name, parameter in inspect.signature(method).parameters.items()
        if parameter.default is parameter.empty and parameter.kind is parameter.POSITIONAL_OR_KEYWORD
    ]
    return method(x, timestep, **{**dict.fromkeys(required[2:]), **arguments})
