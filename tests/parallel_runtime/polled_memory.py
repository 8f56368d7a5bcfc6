"""Memory of the host that all ranks have mapped, as ranks on CPUs reach it: stands for `StreamMemory`."""

from __future__ import annotations

import time
from typing import Any

import torch

from parallel_runtime.exchange.host_lanes import SLOTS, Slots
from parallel_runtime.streaming.share_memory import HostShare

_PATIENCE = 60.0


class PolledMemory:
    """The shared memory as a CPU reaches it, which looks at words until they are what it waits for."""

    def __init__(self, share: HostShare, rank: int, ranks: int, device: torch.device):
        self.slots = Slots(ranks, share.memory.numel())
        self._lane = PolledLane(share.memory)

    def lanes(self) -> Any:
        return self._lane, self._lane, self._lane

    def words(self) -> set[int]:
        """What all words are."""
        ranks = range(self.slots.ranks)
        offsets = [self.slots.word(one, other, slot) for one in ranks for other in ranks for slot in range(SLOTS)]
        return {int(self._lane.word(offset)) for offset in offsets}


class PolledLane:
    """One lane for all: what is told is done at once, so it is the worst order that a GPU could choose."""

    def __init__(self, memory: torch.Tensor):
        self._memory = memory

    def word(self, offset: int) -> torch.Tensor:
        return self._memory[offset : offset + 4].view(torch.int32)

    def after(self, event: Any) -> None:
        """It is."""

    def event(self) -> None:
        return None

    def wait(self, offset: int, value: int) -> None:
        word, deadline = self.word(offset), time.monotonic() + _PATIENCE
        while int(word) != value:
            assert time.monotonic() < deadline, f"the word at {offset} never becomes {value}"
            time.sleep(0)

    def write(self, offset: int, value: int) -> None:
        self.word(offset).fill_(value)

    def put(self, offset: int, part: torch.Tensor) -> None:
        assert part.is_contiguous()
        self._memory[offset : offset + part.nbytes] = part.reshape(-1).view(torch.uint8)

    def get(self, offset: int, part: torch.Tensor) -> None:
        assert part.is_contiguous()
        part.view(-1).view(torch.uint8).copy_(self._memory[offset : offset + part.nbytes])
