"""The exact timestep.

Several diffusers transformers cast the timestep to the model's dtype before they scale it: in bfloat16 0.9046 becomes
908 instead of 904.6, which moves the output thirty times as far as bfloat16 itself does. We hand the embedding the
scaled float32 value instead.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import nn


class ExactTimestep:
    """Holds the timestep of the current forward for the embedder's pre-hook; one object per wrapped transformer."""

    def __init__(self, scale: float):
        self._scale = scale
        self._scaled: torch.Tensor | None = None

    def begin(self, timestep: torch.Tensor | None) -> None:
        """Note the forward's timestep, (batch,), before the transformer rounds it."""
        self._scaled = None if timestep is None else timestep.to(torch.float32) * self._scale

    def hook(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Forward pre-hook (with_kwargs) of the embedder: its first argument becomes the exact timestep.

        Once per forward: where the embedder is the bare sinusoid, models call it again for the guidance.
        """
        scaled, self._scaled = self._scaled, None
        if scaled is None:
            return None
        if args:
            return (scaled, *args[1:]), kwargs
        first = next(iter(inspect.signature(module.forward).parameters))
        return args, {**kwargs, first: scaled}
