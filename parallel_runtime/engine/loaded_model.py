"""A model that a rank has loaded: its weights with their patches, and the networks that run with them."""

from __future__ import annotations

import contextlib
from collections.abc import Hashable
from dataclasses import dataclass, field

import torch

from ..errors import CheckpointError, NotLoadedError
from ..loading.host_copies import HostCopies
from ..loading.loaded_weights import LoadedWeights
from ..loading.patched_weights import PatchedWeights
from ..loading.reading import OnBytes, ignore
from ..networks.network import Network
from ..patching.patch_data import UNPATCHED, WeightPatches


@dataclass(eq=False)
class LoadedModel:
    """One life: made without memory, its weights on the device with any patches, parked on the host, gone."""

    key: Hashable  # what the weights are read from (files with size and time, dtype, blocks)
    title: str  # for messages, such as "FLUX.1 in float32"
    weights: LoadedWeights
    costs: int  # bytes that they take from the device, about
    networks: dict[tuple[Hashable, ...], Network] = field(default_factory=dict)  # what runs with them, by options
    used: int = 0  # when, on the store's clock
    runs_need: int = 0  # bytes that its last run was estimated to need beside the weights
    unloaded: bool = True  # a request has unloaded it, and nothing of its runs is left. The same on all ranks

    def __post_init__(self) -> None:
        self.patched = PatchedWeights(self.weights)

    def change(self, patches: WeightPatches, on_bytes: OnBytes) -> None:
        """Have these patches; costs nothing where they are the same. The weights are here. RequestError for a patch
        that does not fit the network, and whatever `on_bytes` raises."""
        try:
            self.patched.change(patches, on_bytes)
            self.weights.settle(patches.names)
        finally:
            if self.weights.moved:
                self.forget_recordings()
                self.weights.moved = False

    def park(self, copies: HostCopies, on_bytes: OnBytes) -> None:
        """Let the device's memory go for another model: they stay on the host where that has memory, for all ranks."""
        if self.weights.region:
            # Patches cannot be undone for want of memory or of the file: that is read, or missed, when they are back.
            with (
                contextlib.suppress(torch.OutOfMemoryError, NotLoadedError, CheckpointError),
                copies.make(self.key, self.weights.region) as copy,
            ):
                if copy is not None:
                    # What comes back is as in the file, and is patched again.
                    self.patched.change(UNPATCHED, ignore)
                    self.weights.save(copy.memory, on_bytes)
        self.give_back()

    def give_back(self) -> None:
        """Return the weights' memory to the system; the networks stay."""
        if not self.weights.here:
            return
        self.weights.give_back()
        self.patched.forget()
        if not self.weights.keeps_addresses or self.weights.moved:
            self.forget_recordings()
            self.weights.moved = False

    @property
    def shared_on_device(self) -> bool:
        """Other ranks read some of them out of this device's memory."""
        return self.weights.shared is not None and self.weights.shared.dealer.on_device

    def forget_recordings(self) -> None:
        """Let go of the recordings of all its networks."""
        for network in self.networks.values():
            network.forget_recordings()
