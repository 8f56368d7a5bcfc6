"""Brings a network's blocks to the device while it runs, two ahead, into two slots that they use in turn.

Parameters of a block are views of its slot for good, so that compiled code and recordings see the same addresses; a
recorded forward has its copies recorded with it. Every forward begins with empty slots. A rank with more memory than
others has places for blocks that come to these, and brings them once, when the ranks meet.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn

from ..planning.coming_blocks import SLOTS
from .shared_blocks import SharedBlocks


class BlockStream:
    """Brings blocks of weights to their places, two ahead of the one that runs. `places` are those of each block,
    (bytes,) uint8 on the device: a slot, as `Dealer.turns` has it, or its own."""

    def __init__(self, shared: SharedBlocks, places: Sequence[torch.Tensor]):
        self._shared = shared
        self._places = places
        self._brought = 0
        self.reading = shared.reading  # around a call of the network, which may be a replay of its recording
        self._slot = {block: slot for block, slot in enumerate(shared.dealer.turns(len(places))) if slot is not None}
        self._streamed = list(self._slot)
        self._next = dict(zip(self._streamed, self._streamed[SLOTS:], strict=False))
        self._holds: dict[int, int] = {}  # slot -> block
        self._side: Any = None
        self._here: list[Any] = []
        if shared.device.type == "cuda" and self._streamed:
            self._side = torch.cuda.Stream(shared.device)
            self._here = [torch.cuda.Event() for _ in range(SLOTS)]

    def wrap(self, blocks: Sequence[nn.Module]) -> None:
        """Let the forwards of all blocks, in their order, wait for their weights: outside of what is compiled."""
        for number, block in enumerate(self._shared.dealer.coming(blocks)):
            block.forward = partial(self._run, number, block.forward)

    def meet(self) -> bool:
        """Wait until all shares have the weights of this forward; bring the blocks that have places of their own."""
        shared = self._shared
        moved = shared.meet()
        if self._brought != shared.state and len(self._streamed) < len(self._places):
            self.forget()
            with shared.reading():
                for block, place in enumerate(self._places):
                    if block not in self._slot:
                        shared.fetch(block, place)
            self._brought = shared.state
        return moved

    def forget(self) -> None:
        """What has places of its own is not there any more."""
        self._brought = 0

    @contextmanager
    def forward(self) -> Iterator[None]:
        """Around what a forward launches. The first blocks set out at once."""
        self._holds.clear()
        if self._side is not None:
            for block in self._streamed[:SLOTS]:
                self._bring(block)
        try:
            yield
        finally:
            self._holds.clear()
            if self._side is not None:
                torch.cuda.current_stream().wait_stream(self._side)

    def _run(self, block: int, forward: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        """A block's forward, compiled or not, when its weights are there; then its slot is for the next but one."""
        slot, following = self._slot.get(block), self._next.get(block)
        if slot is not None:
            if self._holds.get(slot) != block:  # on a CPU always; else where blocks run in another order
                self._bring(block)
            if self._side is not None:
                torch.cuda.current_stream().wait_event(self._here[slot])
        returned = forward(*args, **kwargs)
        if self._side is not None and following is not None:
            self._bring(following)
        return returned

    def _bring(self, block: int) -> None:
        """Have a block set out after all that was launched, which may read what its slot has."""
        slot, place = self._slot[block], self._places[block]
        if self._side is None:
            self._shared.fetch(block, place)
        else:
            self._side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(self._side):
                self._shared.fetch(block, place)
                self._here[slot].record(self._side)
        self._holds[slot] = block
