"""Blocks of which some are dealt out over the ranks' devices, and the others lie in the host's memory."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager

import torch

from .shared_blocks import SharedBlocks


class MixedBlocks:
    """Two of `SharedBlocks` as one; for the methods see there. What is asked of a block is asked of that which has it.

    Args:
        dealt, host: the parts, each with its blocks in forward order.
        over: which blocks are dealt.
        count: of all blocks.
    """

    def __init__(self, dealt: SharedBlocks, host: SharedBlocks, over: Collection[int], count: int):
        self.device = dealt.device
        self._parts = host, dealt  # the host's memory first, which is given back without waiting where a GPU has none
        self._places: list[tuple[SharedBlocks, int]] = []
        counts = {id(dealt): 0, id(host): 0}
        for block in range(count):
            part = dealt if block in over else host
            self._places.append((part, counts[id(part)]))
            counts[id(part)] += 1

    @property
    def sizes(self) -> Sequence[int]:
        """See `SharedBlocks`."""
        return [part.sizes[number] for part, number in self._places]

    @property
    def size(self) -> int:
        """Bytes of this rank's shares of both."""
        return sum(part.size for part in self._parts)

    @property
    def device_bytes(self) -> int:
        """See `SharedBlocks`."""
        return sum(part.device_bytes for part in self._parts)

    @property
    def on_device(self) -> bool:
        """Whether any of it lies on the device: then all of it goes when that goes."""
        return any(part.on_device for part in self._parts)

    def take(self) -> None:
        """See `SharedBlocks`."""
        for part in self._parts:
            part.take()

    def has_room(self) -> bool:
        """See `SharedBlocks`."""
        return all(part.has_room() for part in self._parts)

    def is_nowhere(self) -> bool:
        """See `SharedBlocks`."""
        return all(part.is_nowhere() for part in self._parts)

    def own_piece(self, block: int) -> tuple[int, int, torch.Tensor]:
        """See `SharedBlocks`."""
        part, number = self._places[block]
        return part.own_piece(number)

    def write(self, block: int, start: int, data: torch.Tensor) -> None:
        """See `SharedBlocks`."""
        part, number = self._places[block]
        part.write(number, start, data)

    def keeps(self, block: int, start: int, stop: int) -> bool:
        """See `SharedBlocks`."""
        part, number = self._places[block]
        return part.keeps(number, start, stop)

    def begin_change(self) -> None:
        """See `SharedBlocks`."""
        for part in self._parts:
            part.begin_change()

    def filled(self, state: str) -> None:
        """See `SharedBlocks`."""
        for part in self._parts:
            part.filled(state)

    def meet(self) -> bool:
        """See `SharedBlocks`."""
        moved = [part.meet() for part in self._parts]  # all of them
        return any(moved)

    def fetch(self, block: int, slot: torch.Tensor) -> None:
        """See `SharedBlocks`."""
        part, number = self._places[block]
        part.fetch(number, slot)

    @contextmanager
    def reading(self) -> Iterator[None]:
        """See `SharedBlocks`."""
        first, second = self._parts
        with first.reading(), second.reading():
            yield

    def close_gone(self) -> None:
        """See `SharedBlocks`."""
        for part in self._parts:
            part.close_gone()

    def give_back(self) -> None:
        """See `SharedBlocks`."""
        for part in self._parts:
            part.give_back()
