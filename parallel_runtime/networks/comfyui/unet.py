"""A U-Net's forward with a place's channels side by side, as convolutions on GPUs want them."""

from __future__ import annotations

from typing import Any

import torch

from ...acceleration.channels_last import FusedFunctions


class UnetFunctions(FusedFunctions):
    """Inside, what attention made of a picture's places stays as it lies."""

    def __init__(self) -> None:
        super().__init__(fused=True)
        self._known[torch.Tensor.contiguous] = self._contiguous

    def _contiguous(self, function: Any, given: dict[str, Any]) -> torch.Tensor:
        x, made = given.pop("input"), None
        if not given and x.ndim == 4 and self._takes(x):
            made = x if x.is_contiguous(memory_format=torch.channels_last) else None
        return made if made is not None else function(x, **given)
