"""When a step is told of: once the GPU has finished it, and where steps are short without keeping the GPU waiting.

A host that waits for every step launches the next one too late: the GPU idles from the end of a step until preview,
message and agreement are through. So of short steps each is told of when the next one is queued already. The host is
never further ahead than that, and a cancel still takes effect within two steps.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

SHORT_SECONDS = 0.25
"""Slower steps are waited for: a cancel a step later would be felt there, and an idle millisecond is not."""


class QueuedOnGpu:
    """A step on the GPU's current stream, the copy of its denoised latent (any shape) behind it."""

    def __init__(self, denoised: torch.Tensor | None, device: torch.device):
        self._host: torch.Tensor | None = None
        if denoised is not None:
            # Pinned, as the copy would wait for the GPU otherwise; new every time, as the one before may be unread.
            # PyTorch keeps such memory, and gives none out again before the copy into it is done, also if we let go.
            self._host = torch.empty(denoised.shape, dtype=denoised.dtype, device="cpu", pin_memory=True)
            self._host.copy_(denoised, non_blocking=True)
        # blocking: the waiting thread sleeps, where it would keep a core busy for the whole step.
        self._end = torch.cuda.Event(blocking=True)
        self._end.record(torch.cuda.current_stream(device))

    def wait(self) -> torch.Tensor | None:
        """Return its denoised latent, on the CPU, when the device has finished it."""
        self._end.synchronize()
        return self._host


class StepTelling:
    """Tells of the steps of one run, in their order, each once; on a CPU, which has finished them, at once. `tell` gets
    the step, of how many, and its denoised latent on the CPU, if there is one. A run that does not end well leaves its
    last step untold."""

    def __init__(self, tell: Callable[[int, int, torch.Tensor | None], None], device: torch.device):
        self._tell, self._device = tell, device
        self._pending: tuple[int, int, QueuedOnGpu] | None = None
        self._told = time.perf_counter()
        # Not before one step has shown it: the first may compile for minutes.
        self._short = False

    def step(self, index: int, total: int, denoised: torch.Tensor | None = None) -> None:
        """The kernels of step `index`, from 0, are launched. Returns when the step before has been told of, or this one
        if it is slow. `denoised` is its preview, on the device, where it may be overwritten afterwards."""
        if self._device.type != "cuda":
            self._tell(index, total, denoised)
            return
        launched = index, total, QueuedOnGpu(denoised, self._device)  # before the host waits
        self.flush()
        self._pending = launched
        if not self._short:
            self.flush()

    def flush(self) -> None:
        """Wait for the step that was not told of yet, if any, and tell of it: at the end of a run."""
        pending, self._pending = self._pending, None
        if pending is None:
            return
        index, total, queued = pending
        denoised = queued.wait()
        now = time.perf_counter()
        self._short, self._told = now - self._told < SHORT_SECONDS, now
        self._tell(index, total, denoised)
