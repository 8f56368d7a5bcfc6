"""Modules of a transformer by their paths, and blocks that mark a device's way through a forward, so that one of
minutes can be told from one that hangs. The host only launches what a GPU does, and a recording is one launch: so
behind a block the GPU raises a number, and copies it to the host, where any thread reads it without asking CUDA."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from fnmatch import fnmatchcase

import torch
from torch import nn


def find_modules(transformer: nn.Module, patterns: Iterable[str]) -> dict[str, nn.Module]:
    """The modules whose paths ("blocks.3.attn") are like any of the patterns ("blocks.*.attn"), in their order."""
    wanted = [(pattern, pattern.count(".")) for pattern in patterns]  # a star stands for one name alone
    return {
        path: module
        for path, module in transformer.named_modules()
        if any(path.count(".") == dots and fnmatchcase(path, pattern) for pattern, dots in wanted)
    }


class Pulse:
    """How far a device is. One for all models of a rank, for as long as it lives: recordings write into it."""

    def __init__(self, device: torch.device):
        on_gpu = device.type == "cuda"
        self._count = torch.zeros(1, dtype=torch.int64, pin_memory=on_gpu)
        self._on_gpu = torch.zeros(1, dtype=torch.int64, device=device) if on_gpu else None

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


MARKS = 16  # of one forward, about: each costs a GPU a few µs, and a forward of ten minutes shows itself every 40 s


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


def mark_blocks(transformer: nn.Module, paths: Sequence[str], pulse: Pulse) -> None:
    """Let every forward mark its way through the blocks. Their lists stay the modules that they are."""
    found = find_modules(transformer, paths).values()
    block_lists = [blocks for blocks in found if isinstance(blocks, nn.ModuleList)]
    total = sum(map(len, block_lists))
    for blocks in block_lists:
        blocks.__class__ = _Marked
        assert isinstance(blocks, _Marked)
        blocks._pulse, blocks._stride = pulse, max(1, total // MARKS)
