"""The weights that a rank holds: of as many models as its device has memory for. The least recently used go first."""

from __future__ import annotations

import contextlib
import gc
import itertools
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

import torch

from .. import memory
from ..acceleration.workspaces import clear_workspaces
from ..loading.held_weights import ArenaWeights, HeldWeights
from ..loading.host_copies import HostCopies
from ..loading.reading import OnBytes
from ..patching.patch_data import WeightPatches
from ..patching.patch_shares import PatchShares
from ..patching.patched_weights import PatchedWeights
from .structure import HostStructure, Structure

_T = TypeVar("_T")


def _ignore(done: int, total: int) -> None:
    """For who does not want to know how far it is."""


@dataclass(eq=False)
class Held:
    """One model's weights on this rank, and the modules that have them.

    Args:
        key: what they were read from (files with size and time, dtype, blocks).
        title: for messages, such as "FLUX.1 in float32".
        costs: bytes that they take from the device; 0 for a memory-mapped file.
        structures: by the options that they are wrapped by.
        used: when, on the store's clock.
        runs_need: bytes that its last run was estimated to need beside the weights.
        unloaded: a request has unloaded it, and nothing of its runs is left. The same on all ranks.
        fresh: just made, with part of its memory, and what it costs was made free before: not to be asked for again.
    """

    store: WeightStore
    key: Hashable
    title: str
    weights: HeldWeights
    costs: int
    structures: dict[tuple[Hashable, ...], Structure | HostStructure] = field(default_factory=dict)
    used: int = 0
    runs_need: int = 0
    unloaded: bool = True
    fresh: bool = False

    def __post_init__(self) -> None:
        self._patched = PatchedWeights(self.weights, self.store.device)

    @property
    def patched(self) -> PatchedWeights:
        """The patches that they have."""
        return self._patched

    def activate(
        self, on_bytes: OnBytes, patches: WeightPatches | None = None, shares: PatchShares | None = None
    ) -> None:
        """Have the weights on the device, and memory for its runs; costs nothing for the model that was used last.

        Args:
            patches: that they are to have; None for any.
            shares: see `PatchedWeights.change`.

        Raises:
            OutOfMemoryError: less is free than they need, though all others were let go.
            NotLoadedError, CheckpointError: the files were replaced, or cannot be read.
            RequestError: a patch that does not fit the network.
            Whatever `on_bytes` raises.
        """
        self._bring_here(on_bytes)
        if patches is not None:
            try:
                self._patched.change(patches, on_bytes, shares)
                self.weights.settle(patches.names)
            finally:
                if self.weights.moved:
                    self.forget_recordings()
                    self.weights.moved = False

    def _bring_here(self, on_bytes: OnBytes) -> None:
        self.unloaded = False
        if self.weights.here and self.store.is_last(self):
            return
        self.used = self.store.tick()
        if not self.weights.here:
            if not self.fresh:
                self.store.free_memory_for(self.title, self.costs, on_bytes=on_bytes)
            self.store.allocate(lambda: self._bring(on_bytes), keep=self)
            self.fresh = False
        self.store.free_beside(self, self.runs_need, on_bytes)

    def _bring(self, on_bytes: OnBytes) -> None:
        copy = self.store.copies.find(self.key, self.weights.size)
        if copy is None or not isinstance(self.weights, ArenaWeights):
            self.weights.fill(on_bytes)
        else:
            copy.pin()
            self.weights.restore(copy.memory, on_bytes)

    def prepare_run(self, needs: int, on_bytes: OnBytes = _ignore) -> None:
        """Let others go where a run of this model may need more than is free beside them.

        Args:
            needs: bytes, estimated; remembered for when the model comes back after others.
        """
        self.runs_need = needs
        if not memory.is_free(needs, self.store.device):
            self._patched.make_room()
        self.store.free_beside(self, needs, on_bytes)

    def park(self, on_bytes: OnBytes) -> None:
        """Let the device's memory go for another model: they stay on the host where that has memory, for all ranks."""
        if isinstance(self.weights, ArenaWeights) and self.weights.here:
            # No memory to undo patches: they are read from the file when they come back.
            with (
                contextlib.suppress(torch.OutOfMemoryError),
                self.store.copies.make(self.key, self.weights.size) as copy,
            ):
                if copy is not None:
                    self._patched.restore()  # what comes back is as in the file, and is patched again
                    self.weights.save(copy.memory, on_bytes)
        self.give_back()

    def give_back(self) -> int:
        """Return the weights' memory to the system; the modules stay. Returns the bytes that it was."""
        if not self.weights.here:
            if self.fresh:  # the load that made them failed before it filled them
                self.fresh = False
                self.weights.give_back()
            return 0
        self.weights.give_back()
        self._patched.forget()
        if not self.weights.keeps_addresses:
            self.forget_recordings()
        return self.weights.size

    @property
    def shared_on_device(self) -> bool:
        """Other ranks read some of them out of this device's memory."""
        return self.weights.shared is not None and self.weights.shared.on_device

    def forget_recordings(self) -> None:
        """Let go of the recordings of all its modules."""
        for structure in self.structures.values():
            structure.transformer.forget_recordings()


class WeightStore:
    """What a rank holds, by what it was read from.

    Which modules there are follows from the requests, and so is the same on all ranks. Whether their weights are on the
    device does not: ranks may have memory for more or for fewer. Nothing that the ranks do together depends on it.

    Args:
        device: where weights are held.
        folder: see `HostCopies`.
    """

    def __init__(self, device: torch.device, rank: int, folder: Path | None = None):
        self.copies = HostCopies(folder)
        self.device = device
        self._rank = rank
        self._held: dict[Hashable, Held] = {}
        self._clock = itertools.count(1)
        self._now = 0

    def tick(self) -> int:
        """The next moment of the store's clock."""
        self._now = next(self._clock)
        return self._now

    def is_last(self, held: Held) -> bool:
        """Whether no other model was used since."""
        return held.used == self._now

    def get(self, key: Hashable) -> Held | None:
        """The weights of that key, on the device or not."""
        return self._held.get(key)

    def make_way(self, key: Hashable) -> None:
        """Let weights go that other ranks read out of this device's memory, but those of that key: they go on all ranks
        or on none. So every rank comes here for the same models, with every request of one."""
        for held in self._held.values():
            if held.key != key and held.shared_on_device and held.weights.here:
                held.give_back()

    def add(self, held: Held) -> None:
        """Keep them."""
        held.used = self.tick()
        self._held[held.key] = held

    def forget(self, held: Held) -> None:
        """Let them go for good, with their modules."""
        self.give_back(held)
        self._held.pop(held.key, None)

    def free_memory_for(
        self, title: str, wanted: int, smaller: Callable[[], list[str]] = list, on_bytes: OnBytes = _ignore
    ) -> None:
        """Park others, the least recently used first, until `wanted` bytes are free.

        Args:
            smaller: what would need less, as parts of a sentence.

        Raises:
            OutOfMemoryError: it would not do to let all of them go; none has gone then.
        """
        if not wanted:
            return
        others = self._others(None)
        given_back = sum(held.costs for held in others)
        memory.require(wanted, self.device, self._rank, title, smaller(), given_back)
        self._park(others, wanted, on_bytes)

    def free_beside(self, keep: Held, wanted: int, on_bytes: OnBytes) -> None:
        """Park other models than `keep`, the least recently used first, while fewer than `wanted` bytes are free."""
        self._park(self._others(keep), wanted, on_bytes)

    def could_have(self) -> int:
        """Bytes of the device that a model can have when all others have left it."""
        here = [held for held in self._held.values() if held.costs and held.weights.here]
        return memory.free_bytes(self.device) + sum(held.costs for held in here)

    def _others(self, keep: Held | None) -> list[Held]:
        others = [
            held
            for held in self._held.values()
            if held is not keep and held.costs and held.weights.here and not held.shared_on_device
        ]
        return sorted(others, key=lambda held: held.used)

    def _park(self, others: list[Held], wanted: int, on_bytes: OnBytes) -> None:
        for held in others:
            if memory.is_free(wanted, self.device):
                return
            held.park(on_bytes)

    def allocate(self, run: Callable[[], _T], keep: Held | None) -> _T:
        """Run what allocates weights; once more, when all that can go has gone, where the device runs out of memory.

        What counts as free may lie in recordings, or in pieces.
        """
        try:
            return run()
        except torch.OutOfMemoryError:
            for held in self._others(keep):
                held.park(_ignore)
            for held in self._held.values():
                held.forget_recordings()
            self.clean()
            return run()

    def give_back(self, held: Held, park: bool = False) -> int:
        """Unload one model: weights, and what runs have left behind; what is compiled stays. Every rank calls it.

        Args:
            park: keep a copy on the host, where it has memory.

        Returns:
            Bytes of weights.
        """
        freed = held.weights.size if held.weights.here else 0
        if park:
            held.park(_ignore)
        else:
            held.give_back()
            self.copies.drop(held.key)
        held.unloaded = True
        for structure in held.structures.values():
            structure.transformer.forget_runs()
        return freed

    def free(self) -> None:
        """Return all weights and recordings to the system, on this rank alone, but for what others read."""
        for held in self._held.values():
            if not held.shared_on_device:
                held.give_back()
            held.forget_recordings()
        self.clean()

    def clean(self) -> None:
        """Return to the system what PyTorch keeps for itself. No frame may hold tensors that should be gone."""
        gc.collect()
        if self.device.type != "cuda":
            return
        if all(held.unloaded for held in self._held.values()):
            # They may lie in the memory of recordings, and recordings of any model use them: not before all are gone.
            clear_workspaces()
        torch.cuda.empty_cache()
