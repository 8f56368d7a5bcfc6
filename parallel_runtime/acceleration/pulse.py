"""Counts the blocks that a device has finished, so that a forward of minutes can be told from one that hangs.

The host only launches what a GPU does, and a recorded forward is one launch: so it is the GPU that counts. Behind a
block it raises a number of its own and copies that to memory of the host, where any thread reads it without asking
CUDA. Both are recorded with a forward and repeat with it.
"""

from __future__ import annotations

import torch


class Pulse:
    """How far a device is. One for all models of a rank, for as long as it lives: recordings write into it."""

    def __init__(self, device: torch.device):
        self._on_gpu: torch.Tensor | None = None
        self._count = torch.zeros(1, dtype=torch.int64, pin_memory=device.type == "cuda")
        if device.type == "cuda":
            self._on_gpu = torch.zeros(1, dtype=torch.int64, device=device)

    def mark(self) -> None:
        """What was launched before on the current stream raises the count when it is through."""
        if self._on_gpu is None:
            self._count += 1
        else:
            self._on_gpu += 1
            self._count.copy_(self._on_gpu, non_blocking=True)

    @property
    def count(self) -> int:
        """Marks that the device has come by. Waits for nothing."""
        return int(self._count)
