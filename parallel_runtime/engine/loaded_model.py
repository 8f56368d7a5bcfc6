"""A model that a rank has loaded: its weights with their patches, and the networks that run with them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Protocol, TypeVar

import torch

from .. import memory
from ..errors import CheckpointError, NotLoadedError
from ..loading.host_copies import HostCopies
from ..loading.loaded_weights import LoadedWeights
from ..loading.patched_weights import PatchedWeights
from ..loading.reading import OnBytes
from ..networks.network import Network
from ..patching.patch_data import WeightPatches

_T = TypeVar("_T")


def ignore(done: int, total: int) -> None:
    """For who does not want to know how far it is."""


class Store(Protocol):
    """What they ask of the store that has them: see `WeightStore`."""

    copies: HostCopies
    device: torch.device

    def tick(self) -> int:
        """See there."""
        ...

    def is_last(self, model: LoadedModel) -> bool:
        """See there."""
        ...

    def free_memory_for(self, title: str, wanted: int, smaller: Sequence[str], on_bytes: OnBytes) -> None:
        """See there."""
        ...

    def free_beside(self, keep: LoadedModel, wanted: int, on_bytes: OnBytes) -> None:
        """See there."""
        ...

    def allocate(self, run: Callable[[], _T], keep: LoadedModel | None) -> _T:
        """See there."""
        ...


@dataclass(eq=False)
class LoadedModel:
    """One life: made without memory, its weights on the device with any patches, parked on the host, gone.

    Args:
        key: what the weights are read from (files with size and time, dtype, blocks).
        title: for messages, such as "FLUX.1 in float32".
        costs: bytes that they take from the device, about.
        networks: what runs with them, by options.
        used: when, on the store's clock.
        runs_need: bytes that its last run was estimated to need beside the weights.
        unloaded: a request has unloaded it, and nothing of its runs is left. The same on all ranks.
    """

    store: Store
    key: Hashable
    title: str
    weights: LoadedWeights
    costs: int
    networks: dict[tuple[Hashable, ...], Network] = field(default_factory=dict)
    used: int = 0
    runs_need: int = 0
    unloaded: bool = True

    def __post_init__(self) -> None:
        self._patched = PatchedWeights(self.weights, self.store.device)

    def activate(
        self,
        on_bytes: OnBytes,
        patches: WeightPatches | None = None,
        smaller: Sequence[str] = (),
    ) -> None:
        """Have the weights on the device, and memory for its runs; costs nothing for the model that was used last.

        Args:
            patches: that they are to have; None for any.
            smaller: what would need less, as sentences.

        Raises:
            OutOfMemoryError: less is free than they need, though all others were let go.
            NotLoadedError, CheckpointError: the files were replaced, or cannot be read.
            RequestError: a patch that does not fit the network.
            Whatever `on_bytes` raises.
        """
        self._bring_here(on_bytes, smaller)
        if patches is not None:
            try:
                self._patched.change(patches, on_bytes)
                self.weights.settle(patches.names)
            finally:
                if self.weights.moved:
                    self.forget_recordings()
                    self.weights.moved = False

    def _bring_here(self, on_bytes: OnBytes, smaller: Sequence[str]) -> None:
        self.unloaded = False
        if self.weights.here and self.store.is_last(self):
            return
        self.used = self.store.tick()
        if not self.weights.here:
            self.store.free_memory_for(self.title, self.costs, smaller, on_bytes)
            self.store.allocate(
                lambda: self.weights.fill(on_bytes, lambda size: self.store.copies.find(self.key, size)), keep=self
            )
        self.store.free_beside(self, self.runs_need, on_bytes)

    def prepare_run(self, needs: int, on_bytes: OnBytes = ignore) -> None:
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
        if self.weights.region:
            # Patches cannot be undone for want of memory or of the file: that is read, or missed, when they are back.
            with (
                contextlib.suppress(torch.OutOfMemoryError, NotLoadedError, CheckpointError),
                self.store.copies.make(self.key, self.weights.region) as copy,
            ):
                if copy is not None:
                    self._patched.restore()  # what comes back is as in the file, and is patched again
                    self.weights.save(copy.memory, on_bytes)
        self.give_back()

    def give_back(self) -> int:
        """Return the weights' memory to the system; the networks stay. Returns the bytes that it was."""
        if not self.weights.here:
            return 0
        self.weights.give_back()
        self._patched.forget()
        if not self.weights.keeps_addresses or self.weights.moved:
            self.forget_recordings()
            self.weights.moved = False
        return self.weights.size

    @property
    def shared_on_device(self) -> bool:
        """Other ranks read some of them out of this device's memory."""
        return self.weights.shared is not None and self.weights.shared.on_device

    def forget_recordings(self) -> None:
        """Let go of the recordings of all its networks."""
        for network in self.networks.values():
            network.forget_recordings()
