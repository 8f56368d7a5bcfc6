"""Brings a network's blocks to the device while it runs, two ahead, into two slots that they use in turn.

Parameters of a block are views of its slot for good, so that compiled code and recordings see the same addresses; a
forward that is recorded has its copies recorded with it. Every forward begins with empty slots: what it reads follows
from nothing that was before.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import torch

from .deal import resident_blocks
from .shared_blocks import SharedBlocks

_T = TypeVar("_T")

SLOTS = 2


class BlockStream:
    """See the module. It can be used when it is set up, and lives as long as who refers to it.

    Args:
        resident: how many blocks stay where they are; see `resident_blocks`.
    """

    def __init__(self, resident: int = 0) -> None:
        self._resident = resident
        self.set_up(None, [])

    def coming(self, blocks: Sequence[_T]) -> list[_T]:
        """Of all blocks those that it brings, in its order."""
        stay = resident_blocks(self._resident, len(blocks))
        return [block for number, block in enumerate(blocks) if number not in stay]

    def set_up(self, shared: SharedBlocks | None, slots: Sequence[torch.Tensor]) -> None:
        """Take blocks from there.

        Args:
            slots: SLOTS of them, (bytes,) uint8 on the device, each as large as the largest block.
        """
        self._given = shared
        self._slots = slots
        self._holds: list[int | None] = [None] * len(slots)
        self._side: Any = None
        self._here: list[Any] = []
        if shared is not None and shared.device.type == "cuda":
            self._side = torch.cuda.Stream(shared.device)
            self._here = [torch.cuda.Event() for _ in slots]

    @property
    def _shared(self) -> SharedBlocks:
        assert self._given is not None, "a stream of weights that are not here"
        return self._given

    @property
    def _count(self) -> int:
        return len(self._shared.sizes)

    def meet(self) -> bool:
        """See `SharedBlocks.meet`."""
        return self._shared.meet()

    @contextmanager
    def reading(self) -> Iterator[None]:
        """Around a call of the network, which may be a replay of its recording."""
        with self._shared.reading():
            yield

    @contextmanager
    def forward(self) -> Iterator[None]:
        """Around what a forward launches. The first blocks set out at once."""
        self._holds = [None] * len(self._slots)
        if self._side is not None:
            self._after_all()
            for block in range(min(len(self._slots), self._count)):
                self._bring(block)
        try:
            yield
        finally:
            self._holds = [None] * len(self._slots)
            if self._side is not None:
                torch.cuda.current_stream().wait_stream(self._side)

    def before(self, block: int) -> None:
        """A block is about to run: it is there, in the order of the stream."""
        slot = block % len(self._slots)
        if self._holds[slot] != block:  # on a CPU always; on a GPU where blocks run in another order than theirs
            self._after_all()
            self._bring(block)
        if self._side is not None:
            torch.cuda.current_stream().wait_event(self._here[slot])

    def after(self, block: int) -> None:
        """A block has run, and its slot is free for the next but one."""
        following = block + len(self._slots)
        if self._side is not None and following < self._count:
            self._after_all()
            self._bring(following)

    def _after_all(self) -> None:
        if self._side is not None:
            self._side.wait_stream(torch.cuda.current_stream())

    def _bring(self, block: int) -> None:
        slot = block % len(self._slots)
        target = self._slots[slot][: self._shared.sizes[block]]
        if self._side is None:
            self._shared.fetch(block, target)
        else:
            with torch.cuda.stream(self._side):
                self._shared.fetch(block, target)
                self._here[slot].record(self._side)
        self._holds[slot] = block
