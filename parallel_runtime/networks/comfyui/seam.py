"""Where a call leaves ComfyUI's process and enters the network in a rank: the same method on both sides."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn


def seam_of(network: nn.Module) -> str:
    """Name of the method: `_forward`, behind the wrappers of other nodes, where a network has one.

    Some networks do more around it in `forward` (MiniMax H3 rescales the audio), which ComfyUI's process does already,
    but for a loop in the ranks.
    """
    return "_forward" if hasattr(network, "_forward") else "forward"


IN_LOOP = "in_loop"
"""Argument of calls that a loop in the ranks makes of a network which rescales."""


def enter(
    network: nn.Module, x: Any, timestep: torch.Tensor, arguments: Mapping[str, Any], in_loop: bool = False
) -> Any:
    """Call the network at the seam.

    Args:
        arguments: without those that are None, which some networks want to be told.
        in_loop: with what the network does around it.
    """
    method = getattr(network, "forward" if in_loop else seam_of(network))
    required = [
        name
        for name, parameter in inspect.signature(method).parameters.items()
        if parameter.default is parameter.empty and parameter.kind is parameter.POSITIONAL_OR_KEYWORD
    ]
    return method(x, timestep, **{**dict.fromkeys(required[2:]), **arguments})
