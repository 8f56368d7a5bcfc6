"""Counts the blocks that a device has finished, so that a forward of minutes can be told from one that hangs.

The host only launches what a GPU does, and a recorded forward is one launch: so it is the GPU that counts. Behind a
block it raises a number of its own and copies that to memory of the host, where any thread reads it without asking
CUDA. Both are recorded with a forward and repeat with it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import nn

from ..models.spec import ModelSpec
from .module_paths import find_modules

MARKS = 16
"""Of one forward, about: each costs a GPU a few microseconds. A forward of ten minutes shows itself every 40 s."""


def _ignore() -> None:
    """Nobody listens."""


class Pulse:
    """How far a device is. One for all models of a rank, for as long as it lives: recordings write into it."""

    def __init__(self, device: torch.device):
        self.on_mark: Callable[[], None] = _ignore
        """Called behind every mark, where the host is between two blocks."""
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
        self.on_mark()

    @property
    def count(self) -> int:
        """Marks that the device has come by. Waits for nothing."""
        return int(self._count)


class _Marked(nn.ModuleList):
    """A list of blocks whose loop marks each `_stride`-th. The loop is the forward's own, which is never compiled as a
    whole: so compiled blocks, and others that take their place later, are counted as well."""

    _pulse: Pulse
    _stride: int

    def __iter__(self) -> Iterator[nn.Module]:
        for number, block in enumerate(super().__iter__()):
            yield block
            if number % self._stride == 0:
                self._pulse.mark()


def mark_blocks(transformer: nn.Module, spec: ModelSpec, pulse: Pulse) -> None:
    """Let every forward mark its way through the blocks. Their lists stay the modules that they are."""
    found = find_modules(transformer, spec.block_lists).values()
    block_lists = [blocks for blocks in found if isinstance(blocks, nn.ModuleList)]
    total = sum(len(blocks) for blocks in block_lists)
    for blocks in block_lists:
        blocks.__class__ = _Marked
        assert isinstance(blocks, _Marked)
        blocks._pulse, blocks._stride = pulse, max(1, total // MARKS)


def pulse_of(transformer: nn.Module, spec: ModelSpec) -> Pulse | None:
    """The pulse that a transformer's blocks mark, if they mark one."""
    found = find_modules(transformer, spec.block_lists).values()
    return next((blocks._pulse for blocks in found if isinstance(blocks, _Marked)), None)
