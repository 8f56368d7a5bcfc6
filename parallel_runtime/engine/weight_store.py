"""Models on a rank's device, as many as have room: weights, patches, networks. The least recently used go first."""

from __future__ import annotations

import contextlib
import gc
import itertools
import time
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import torch

from .. import memory
from ..acceleration.cuda_graphs import clear_workspaces
from ..errors import CheckpointError, NotLoadedError, OutOfMemoryError
from ..loading.host_copies import HostCopies
from ..loading.loaded_weights import LoadedWeights
from ..loading.patched_weights import PatchedWeights
from ..loading.reading import OnBytes, ignore
from ..networks.network import Network
from ..patching.patch_data import UNPATCHED, WeightPatches

ROOM_SECONDS = 20.0
"""That a rank waits for the host's memory of a model that it has let go: until the others have let it go, too."""


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
        finally:
            if self.weights.moved:
                self.forget_recordings()

    def park(self, copies: HostCopies, on_bytes: OnBytes) -> None:
        """Let the device's memory go for another model: they stay on the host where that has memory, for all ranks."""
        if self.weights.here and self.weights.shared is None:
            # Patches cannot be undone for want of memory or of the file: that is read, or missed, when they are back.
            with (
                contextlib.suppress(torch.OutOfMemoryError, NotLoadedError, CheckpointError),
                copies.make(self.key, self.weights.size) as copy,
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

    @property
    def shared_on_device(self) -> bool:
        """Other ranks read some of them out of this device's memory."""
        return self.weights.shared is not None and self.weights.shared.dealer.on_device

    def forget_recordings(self) -> None:
        """Let go of the recordings of all its networks."""
        self.weights.moved = False
        for network in self.networks.values():
            network.forget_recordings()


class WeightStore:
    """What a rank holds, by what it was read from; the folder is that of `HostCopies`. Which modules there are follows
    from the requests, and is the same on all ranks. Whether their weights are on the device does not, as ranks may have
    memory for more or for fewer: nothing that the ranks do together depends on it."""

    def __init__(self, device: torch.device, rank: int, folder: Path | None = None):
        self.copies, self.device, self._rank = HostCopies(folder), device, rank
        self.models: dict[Hashable, LoadedModel] = {}
        self._clock = itertools.count(1)
        self._now = 0

    def activate(
        self, model: LoadedModel, on_bytes: OnBytes, patches: WeightPatches | None = None, smaller: Sequence[str] = ()
    ) -> None:
        """Have weights on the device with these patches (None: any), and memory for their runs; costs nothing for the
        model that was used last. `smaller`: what would need less, as sentences. OutOfMemoryError: less is free than
        they need, though all others were let go. Else raises as `LoadedWeights.fill` and `LoadedModel.change`."""
        model.unloaded = False
        if not model.weights.here or model.used != self._now:
            model.used = self._now = next(self._clock)
            if not model.weights.here:
                if model.costs:
                    # None of the others goes where it would not do to let all of them go.
                    given_back = sum(other.costs for other in self._others(model))
                    memory.require(model.costs, self.device, self._rank, model.title, smaller, given_back)
                    self.free_beside(model, model.costs, on_bytes)
                self._fill(model, on_bytes)
            self.free_beside(model, model.runs_need, on_bytes)
        if patches is not None:
            model.change(patches, on_bytes)

    def prepare_run(self, model: LoadedModel, needs: int, on_bytes: OnBytes = ignore) -> None:
        """Let others go where a run of this model may need more than is free beside them: `needs` bytes, estimated,
        which are remembered for when the model comes back after others."""
        model.runs_need = needs
        if not memory.is_free(needs, self.device):
            model.patched.make_room()
        self.free_beside(model, needs, on_bytes)

    def make_way(self, key: Hashable) -> None:
        """Let weights go that other ranks read out of this device's memory, but those of that key: they go on all ranks
        or on none. So every rank comes here for the same models, with every request of one."""
        for model in self.models.values():
            if model.key != key and model.shared_on_device and model.weights.here:
                model.give_back()
            if model.weights.shared is not None:
                model.weights.shared.close_gone()

    def forget(self, model: LoadedModel) -> None:
        """Let them go for good, with their modules."""
        self.give_back(model)
        self.models.pop(model.key, None)

    def free_beside(self, keep: LoadedModel, wanted: int, on_bytes: OnBytes) -> None:
        """Park other models than `keep`, the least recently used first, while fewer than `wanted` bytes are free."""
        for model in self._others(keep):
            if memory.is_free(wanted, self.device):
                return
            model.park(self.copies, on_bytes)

    def could_have(self) -> int:
        """Bytes of the device that a model can have when all others have left it."""
        return memory.free_bytes(self.device) + sum(model.costs for model in self._here())

    def _others(self, keep: LoadedModel) -> list[LoadedModel]:
        may_go = [model for model in self._here() if model is not keep and not model.shared_on_device]
        return sorted(may_go, key=lambda model: model.used)

    def _here(self) -> list[LoadedModel]:
        return [model for model in self.models.values() if model.costs and model.weights.here]

    def _fill(self, model: LoadedModel, on_bytes: OnBytes) -> None:
        """Bring weights to the device; once more, when all that can go has gone, where it runs out of memory: what
        counts as free may lie in recordings, or in pieces. Where the host does, others that stream from there go."""
        fill = partial(model.weights.fill, on_bytes, partial(self.copies.find, model.key))
        try:
            fill()
            return
        except torch.OutOfMemoryError:
            for other in self._others(model):
                other.park(self.copies, ignore)
            for each in self.models.values():
                each.forget_recordings()
            self.clean()
        except OutOfMemoryError:
            if not self._make_room_on_host(model):
                raise
        fill()

    def _make_room_on_host(self, keep: LoadedModel) -> bool:
        """Let other models' shares of the host's memory go, the least recently used first, until there is room for
        these. Each rank by itself: all of them miss the same memory, at about the same time."""
        wanted = keep.weights.shared
        if wanted is None:
            return False
        # Also what this rank has let go already: the memory is free when the others have, too.
        others = sorted((model for model in self.models.values() if model is not keep), key=lambda model: model.used)
        for model in others:
            if model.weights.shared is not None and not model.shared_on_device:
                model.give_back()
                deadline = time.monotonic() + ROOM_SECONDS
                while not (model.weights.shared.is_nowhere() or wanted.has_room()) and time.monotonic() < deadline:
                    time.sleep(0.01)
        return wanted.has_room()

    def give_back(self, model: LoadedModel, park: bool = False) -> int:
        """Unload a model and what its runs left, not what is compiled, on every rank. `park`: the host keeps a copy."""
        freed = model.weights.size if model.weights.here else 0
        if park:
            model.park(self.copies, ignore)
        else:
            model.give_back()
            self.copies.drop(model.key)
        model.unloaded = True
        for network in model.networks.values():
            network.forget_runs()
        return freed

    def free(self) -> None:
        """Return all weights and recordings to the system, on this rank alone, but for what others read."""
        for model in self.models.values():
            if not model.shared_on_device:
                model.give_back()
            model.forget_recordings()
        self.clean()

    def clean(self) -> None:
        """Return to the system what PyTorch keeps for itself. No frame may hold tensors that should be gone."""
        gc.collect()
        if self.device.type != "cuda":
            return
        if all(model.unloaded for model in self.models.values()):
            # They may lie in the memory of recordings, and recordings of any model use them: not before all are gone.
            clear_workspaces()
        torch.cuda.empty_cache()
