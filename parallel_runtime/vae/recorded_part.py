"""A rank's part of a picture as a CUDA graph: several ranks compute it faster than Python launches its kernels."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from ..acceleration.recordings import RecordedForward
from ..mesh.mesh import Mesh
from ..switches import is_on
from .families import find_half

Run = Callable[[torch.Tensor], torch.Tensor]
"""A rank's part of a half: its rows -> its rows of what is made."""


class RecordedPart(RecordedForward):
    """Records, as `RecordedForward`, what is given with each call, and computes the same from the same rows."""

    def __init__(self, record: Any = None):
        super().__init__(lambda own, **kind: self._run(own), record=record)
        self._run: Run

    def record_or_run(self, mesh: Mesh, run: Run, own: torch.Tensor, **kind: int) -> torch.Tensor:
        """Run it, or what was recorded. Collective over the mesh's sequence group.

        Args:
            kind: what `run` depends on beside these rows, on any rank.
        """
        self._run = run
        made: torch.Tensor = self(mesh, (own,), kind)
        del self._run  # it holds the request
        return made


def can_be_recorded(vae: nn.Module, name: str, device: torch.device) -> bool:
    """Whether a half is one whose CUDA graph was seen to compute the same, on a GPU."""
    half = find_half(vae, name)
    return name == "decoder" and half is not None and half.recorded and device.type == "cuda" and is_on("recordings")
