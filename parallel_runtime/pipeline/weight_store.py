"""The weights that a rank holds: of as many models as its device has room for. The least recently used go first."""

from __future__ import annotations

import gc
import itertools
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import Any

import torch

from .. import memory
from ..loading.held_weights import HeldWeights
from ..loading.reading import OnBytes
from .structure import Structure


@dataclass(eq=False)
class Held:
    """One model's weights on this rank, and the modules that have them.

    Args:
        key: what they were read from (files with size and time, dtype, blocks).
        title: for messages, such as "FLUX.1 in float32".
        costs: bytes that they take from the device; 0 for a memory-mapped file.
        structures: by (attention, compile).
        used: when, on the store's clock.
    """

    store: WeightStore
    key: Hashable
    title: str
    weights: HeldWeights
    costs: int
    structures: dict[tuple[Any, ...], Structure] = field(default_factory=dict)
    used: int = 0

    def activate(self, on_bytes: OnBytes) -> None:
        """Have the weights on the device; costs nothing where they are.

        Raises:
            OutOfMemoryError: less is free than they need, though all others were let go.
            NotLoadedError, CheckpointError: the files were replaced, or cannot be read.
            Whatever `on_bytes` raises.
        """
        self.used = self.store.tick()
        if not self.weights.here:
            self.store.make_room_for(self.title, self.costs)
            self.weights.fill(on_bytes)

    def give_back(self) -> int:
        """Return the weights' memory to the system; the modules stay. Returns the bytes that it was."""
        if not self.weights.here:
            return 0
        self.weights.give_back()
        if not self.weights.keeps_addresses:
            for structure in self.structures.values():
                structure.transformer.forget_recordings()
        return self.weights.size


class WeightStore:
    """What a rank holds, by what it was read from.

    Which modules there are follows from the requests, and so is the same on all ranks. Whether their weights are on the
    device does not: ranks may have room for more or for fewer. Nothing that the ranks do together depends on it.
    """

    def __init__(self, device: torch.device, rank: int):
        self._device = device
        self._rank = rank
        self._held: dict[Hashable, Held] = {}
        self._clock = itertools.count(1)

    def tick(self) -> int:
        """The next moment of the store's clock."""
        return next(self._clock)

    def get(self, key: Hashable) -> Held | None:
        """The weights of that key, on the device or not."""
        return self._held.get(key)

    def add(self, held: Held) -> None:
        """Keep them."""
        held.used = self.tick()
        self._held[held.key] = held

    def forget(self, held: Held) -> None:
        """Let them go for good, with their modules."""
        self.give_back(held)
        self._held.pop(held.key, None)

    def make_room_for(self, title: str, wanted: int, smaller: Callable[[], list[str]] = list) -> None:
        """Let others go, the least recently used first, until `wanted` bytes are free.

        Args:
            smaller: what would need less, as parts of a sentence.

        Raises:
            OutOfMemoryError: it would not do to let all of them go; none has gone then.
        """
        if not wanted:
            return
        others = sorted((held for held in self._held.values() if held.weights.here), key=lambda held: held.used)
        given_back = sum(held.costs for held in others)
        memory.require(wanted, self._device, self._rank, title, smaller(), given_back)
        for held in others:
            if memory.has_room(wanted, self._device):
                return
            held.give_back()

    def give_back(self, held: Held) -> int:
        """Unload one model: weights, and what runs have left behind; what is compiled stays. Every rank calls it.

        Returns:
            Bytes of weights.
        """
        freed = held.give_back()
        for structure in held.structures.values():
            structure.transformer.forget_runs()
        return freed

    def free(self) -> None:
        """Return all weights and recordings to the system, on this rank alone."""
        for held in self._held.values():
            held.give_back()
            for structure in held.structures.values():
                structure.transformer.forget_recordings()
        self.clean()

    def clean(self) -> None:
        """Return to the system what PyTorch keeps for itself. No frame may hold tensors that should be gone."""
        gc.collect()
        if self._device.type == "cuda":
            # Its workspaces may lie in a recording's memory; they are made anew at the next product.
            getattr(torch._C, "_cuda_clearCublasWorkspaces", lambda: None)()
            torch.cuda.empty_cache()
