"""The weights that a rank holds: of as many models as its device has memory for. The least recently used go first."""

from __future__ import annotations

import gc
import itertools
import time
from collections.abc import Callable, Hashable, Sequence
from functools import partial
from pathlib import Path

import torch

from .. import memory
from ..acceleration.cuda_graphs import clear_workspaces
from ..errors import OutOfMemoryError
from ..loading.host_copies import HostCopies
from ..loading.reading import OnBytes, ignore
from ..patching.patch_data import WeightPatches
from .loaded_model import LoadedModel

ROOM_SECONDS = 20.0
"""That a rank waits for the host's memory of a model that it has let go: until the others have let it go, too."""


class WeightStore:
    """What a rank holds, by what it was read from; the folder is that of `HostCopies`.

    Which modules there are follows from the requests, and so is the same on all ranks. Whether their weights are on the
    device does not: ranks may have memory for more or for fewer. Nothing that the ranks do together depends on it.
    """

    def __init__(self, device: torch.device, rank: int, folder: Path | None = None):
        self.copies, self.device, self._rank = HostCopies(folder), device, rank
        self.models: dict[Hashable, LoadedModel] = {}
        self._clock = itertools.count(1)
        self._now = 0

    def activate(
        self, model: LoadedModel, on_bytes: OnBytes, patches: WeightPatches | None = None, smaller: Sequence[str] = ()
    ) -> None:
        """Have weights on the device with these patches (None: any), and memory for their runs; costs nothing for the
        model that was used last. `smaller`: what would need less, as sentences.

        Raises:
            OutOfMemoryError: less is free than they need, though all others were let go.
            NotLoadedError, CheckpointError: the files were replaced, or cannot be read.
            RequestError: a patch that does not fit the network.
            Whatever `on_bytes` raises.
        """
        model.unloaded = False
        weights = model.weights
        if not weights.here or model.used != self._now:
            model.used = self._now = next(self._clock)
            if not weights.here:
                if model.costs:
                    # None of the others goes where it would not do to let all of them go.
                    given_back = sum(other.costs for other in self._others(model))
                    memory.require(model.costs, self.device, self._rank, model.title, smaller, given_back)
                    self.free_beside(model, model.costs, on_bytes)
                self._allocate(partial(weights.fill, on_bytes, partial(self.copies.find, model.key)), keep=model)
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

    def add(self, model: LoadedModel) -> None:
        """Keep them."""
        model.used = self._now = next(self._clock)
        self.models[model.key] = model

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

    def _allocate(self, run: Callable[[], None], keep: LoadedModel) -> None:
        """Run what allocates weights; once more, when all that can go has gone, where the device runs out of memory:
        what counts as free may lie in recordings, or in pieces. Where the host does, others that stream from there go
        first."""
        try:
            run()
            return
        except torch.OutOfMemoryError:
            for model in self._others(keep):
                model.park(self.copies, ignore)
            for model in self.models.values():
                model.forget_recordings()
            self.clean()
        except OutOfMemoryError:
            if not self._make_room_on_host(keep):
                raise
        run()

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
        """Unload one model: weights, and what runs have left behind; what is compiled stays. Every rank calls it.
        `park` keeps a copy on the host, where it has memory."""
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
