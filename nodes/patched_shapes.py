"""Shapes that a LoRA gives to weights: FLUX's Canny and Depth LoRA widen the first layer, and ComfyUI reads from that
weight how many channels it is to concatenate to the latent."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import comfy.lora
import torch

from .untouched import Untouched


class PatchedShapes:
    """The weights of a model on the meta device, some of them in another shape for a while. The model has this, and
    this does not have the model, which is to go with the last reference to it.

    Args:
        untouched: is told, as these are no changes of another node.
    """

    def __init__(self, untouched: Untouched):
        self._untouched = untouched
        self._originals: dict[str, torch.nn.Parameter] = {}

    def take(self, model: torch.nn.Module, patches: Mapping[str, Sequence[Any]]) -> None:
        """Have the model in the shapes that these patches give, and in the network's own otherwise."""
        for key, original in self._originals.items():
            self._put(model, key, original)
        self._originals.clear()
        shape_of = getattr(comfy.lora, "calculate_shape", None)  # an older ComfyUI does not know it
        if shape_of is None:
            return
        for key, given in patches.items():
            layer, _, name = key.rpartition(".")
            weight = getattr(model.get_submodule(layer), name)
            shape = tuple(shape_of(given, weight, key))
            if isinstance(weight, torch.nn.Parameter) and shape != tuple(weight.shape):
                self._originals[key] = weight
                wider = torch.empty(shape, dtype=weight.dtype, device="meta")
                self._put(model, key, torch.nn.Parameter(wider, requires_grad=False))

    def _put(self, model: torch.nn.Module, key: str, weight: torch.nn.Parameter) -> None:
        layer, _, name = key.rpartition(".")
        setattr(model.get_submodule(layer), name, weight)
        self._untouched.expect(layer, name, weight)
