"""Builds ComfyUI's networks with few, narrow layers and random weights. Imported where `comfy` is importable."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn


@dataclass
class Tiny:
    """A network and calls of it.

    Args:
        network: in float32 on the CPU.
        calls: name -> arguments, x and timestep among them.
        whole: calls of which every rank computes all blocks.
    """

    network: nn.Module
    calls: dict[str, dict[str, Any]] = field(default_factory=dict)
    whole: tuple[str, ...] = ()


TINY: dict[str, Callable[[], Tiny]] = {}
"""By a name of the family and its variant."""


def tiny(name: str) -> Callable[[Callable[[], Tiny]], Callable[[], Tiny]]:
    """Register a builder."""

    def register(build: Callable[[], Tiny]) -> Callable[[], Tiny]:
        TINY[name] = build
        return build

    return register


def noise(*shape: int, seed: int = 5) -> torch.Tensor:
    """Random numbers that every rank draws alike."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def build(network: Callable[..., nn.Module], *args: Any, **options: Any) -> nn.Module:
    """A network with ComfyUI's plain operations and weights that keep numbers in range, alike on every rank."""
    import comfy.ops

    options = {"dtype": torch.float32, "device": "cpu", "operations": comfy.ops.disable_weight_init, **options}
    made = network(*args, **options)
    return made if options["device"] == "meta" else fill(made)


def fill(module: nn.Module) -> nn.Module:
    """Random weights: products keep the scale of what goes in; norms near one."""
    generator = torch.Generator().manual_seed(0)
    for name, parameter in module.named_parameters():
        drawn = torch.randn(parameter.shape, generator=generator)
        if parameter.ndim <= 1:
            is_scale = "norm" in name and name.endswith(("weight", "scale"))
            drawn = 0.1 * drawn + (1.0 if is_scale else 0.0)
        else:
            drawn /= math.sqrt(max(1, parameter[0].numel()))
        parameter.data = drawn.to(parameter.dtype)
    return module.eval().requires_grad_(False)


def call(tiny: Tiny, name: str, attention: Callable[..., Any] | None = None) -> torch.Tensor:
    """Run a call; several outputs (video and audio) as one row."""
    arguments = copy.deepcopy(tiny.calls[name])  # some networks write into them
    options = dict(arguments.pop("transformer_options", {}))
    if attention is not None:
        options["optimized_attention_override"] = attention
    output = tiny.network(arguments.pop("x"), arguments.pop("timestep"), transformer_options=options, **arguments)
    return output if isinstance(output, torch.Tensor) else torch.cat([each.flatten() for each in output])
