"""The models of a rank by the client's names: loading them, and letting them go."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable
from pathlib import Path

import torch

from .. import memory
from ..acceleration.pulse import Pulse
from ..config import ParallelConfig, ParallelPlan
from ..errors import NotLoadedError
from ..loading.checkpoint import Checkpoint
from ..loading.held_weights import MakeArena
from ..loading.weights import give_weights, hold_weights
from ..mesh.mesh import Mesh, single_rank_mesh
from ..networks.marked_blocks import mark_blocks
from ..networks.parallel_transformer import ParallelTransformer
from ..pipefusion.stage import Stage
from ..planning.cut import most_parameters
from ..requests.control import Control
from ..requests.requests import Load
from .opened import Opened, Skeleton
from .plan_meshes import Place
from .resident import Resident, owned_blocks
from .structure import Structure
from .weight_store import Held, WeightStore

_FILE_DTYPES = {torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"}
MOST = 8
"""Models with their configurations that are kept, with what was compiled of them, whether their weights are there or
not. Which ones follows from the requests, so that all ranks keep the same."""


class Residency:
    """The models of a rank. Which weights are on the device is the store's affair.

    Args:
        arena: see `hold_weights`.
        folder: see `HostCopies`.
    """

    def __init__(self, device: torch.device, rank: int, arena: MakeArena | None = None, folder: Path | None = None):
        self._device = device
        self._rank = rank
        self._arena = arena
        self.store = WeightStore(device, rank, folder)
        self.pulse = Pulse(device)
        self._residents: OrderedDict[str, Resident] = OrderedDict()

    def get(self, key: str) -> Resident:
        """The model of that name, its weights on the device or not.

        Raises:
            NotLoadedError: it was not loaded, or has been forgotten.
        """
        if key not in self._residents:
            raise NotLoadedError("The model is not loaded in the pool.", "Queue the prompt again.")
        self._residents.move_to_end(key)
        return self._residents[key]

    def load(
        self,
        request: Load,
        config: ParallelConfig,
        opened: Opened,
        loaded: ParallelPlan,
        place: Place | None,
        memory_bytes: int,
        control: Control,
    ) -> tuple[Resident, bool]:
        """Have a model on the device; return it, and whether its modules were here already.

        Args:
            loaded: see `Resident`.
            place: in `loaded` where it has several stages, None on a rank outside of it.
            memory_bytes: that a rank may use for weights, 0 where that is not known; the same on all ranks.

        Raises:
            CheckpointError, UnsupportedModelError: a file that does not fit its family.
            OutOfMemoryError: it does not fit this rank's device.
            Cancelled: this rank heard of a cancel.
        """
        most = most_parameters(memory_bytes, opened.dtype.itemsize)
        owned = owned_blocks(opened.facts, place, most) if place is not None else None
        used = self._rank < request.ranks and (loaded.pipe == 1 or owned is not None)
        key = (opened.checkpoint.identity, request.dtype, loaded.pipe, owned)
        known = self._residents.get(request.model)
        if known is not None and known.held is not None and known.held.key != key:
            self.forget(request.model)  # the file was replaced
        held = self.store.get(key) if used else None
        reused = held is not None or not used
        structure = None
        try:
            if used:
                skeleton = None
                if held is None:
                    skeleton = opened.build(owned)
                    held = self._build(opened, skeleton, key, control)
                held.activate(control.loading)
                structure = self._structure(held, skeleton, opened, config, place, owned)
        except BaseException:
            if held is not None and not reused:
                self.store.forget(held)
            raise
        checkpoint = opened.checkpoint
        resident = Resident(
            request.model, checkpoint.spec, dict(checkpoint.config), config, request.ranks, opened.dtype, opened.facts,
            loaded, structure, held,
        )  # fmt: skip
        self._keep(resident)
        return resident, reused

    def _keep(self, resident: Resident) -> None:
        self._residents[resident.key] = resident
        self._residents.move_to_end(resident.key)
        while len(self._residents) > MOST:
            self.forget(next(iter(self._residents)))

    def _build(self, opened: Opened, skeleton: Skeleton, key: Hashable, control: Control) -> Held:
        """The weights of a model that is not here; none is read yet."""
        module, rules = skeleton.module, skeleton.rules
        dtype, checkpoint = opened.dtype, opened.checkpoint
        title = f"{checkpoint.spec.title} in {str(dtype).removeprefix('torch.')}"
        elements = sum(parameter.numel() for parameter in module.parameters())
        mapped = self._arena is None and self._device.type == "cpu" and _is_stored_as(checkpoint, dtype)

        def smaller() -> list[str]:
            if dtype != torch.float32 or elements * 2 >= memory.free_bytes(self._device):
                return []
            return [f"Choose bf16 as weight_dtype: that needs {elements * 2 / 2**30:.1f} GiB."]

        costs = 0 if mapped else elements * dtype.itemsize
        self.store.free_memory_for(title, costs, smaller, lambda done, total: control.check_cancel())
        weights = self.store.allocate(
            lambda: hold_weights(module, checkpoint, rules, dtype, self._device, self._arena), keep=None
        )
        held = Held(self.store, key, title, weights, costs)
        self.store.add(held)
        return held

    def _structure(
        self,
        held: Held,
        skeleton: Skeleton | None,
        opened: Opened,
        config: ParallelConfig,
        place: Place | None,
        owned: tuple[int, int] | None,
    ) -> Structure:
        compiles = config.compiles(self._device.type == "cuda")
        options = (config.attention, compiles, compiles and config.compile == "auto")
        if options not in held.structures:
            skeleton = skeleton or opened.build(owned)
            module, relay = skeleton.module, skeleton.relay
            spec = opened.checkpoint.spec
            mark_blocks(module, spec, self.pulse)
            give_weights(module, opened.checkpoint, held.weights)
            if relay is None or place is None:
                held.structures[options] = Structure.wrap(module, spec, *options)
            else:
                stage = Stage(module, spec, relay, single_rank_mesh(), *options[:2])
                stage.check_ring(place.layout)
                held.structures[options] = Structure(spec, *options, stage)
        return held.structures[options]

    def forget(self, name: str) -> None:
        """Let a model go for good, but for what others have in common with it. Every rank calls it."""
        resident = self._residents.pop(name, None)
        if resident is None or resident.held is None:
            return
        others = [other for other in self._residents.values() if other.held is resident.held]
        if not others:
            self.store.forget(resident.held)
        for options, structure in list(resident.held.structures.items()):
            if not any(other.structure is structure for other in others):
                del resident.held.structures[options]

    def give_back(self, name: str) -> int:
        """Return a model's weights to the system, and what its runs have left behind. Every rank calls it.

        Returns:
            Bytes of weights; 0 for a model that is not here.
        """
        resident = self._residents.get(name)
        freed = self.store.give_back(resident.held) if resident is not None and resident.held is not None else 0
        self.store.clean()
        return freed

    def has_others(self, name: str) -> bool:
        """Whether weights of other models than this one are on the device."""
        own = self._residents.get(name)
        held = [other.held for other in self._residents.values() if own is None or other.held is not own.held]
        return any(each is not None and each.weights.here for each in held)

    def leave(self, mesh: Mesh) -> None:
        """Let go of what was recorded over a mesh whose groups will be gone. Every rank of the mesh calls it."""
        for transformer in self._transformers():
            transformer.leave(mesh)

    def leave_world(self) -> None:
        """Let go of all that several ranks have in common, before their groups are destroyed."""
        for transformer in self._transformers():
            transformer.leave_world()

    def forget_runs(self) -> None:
        """Let go of what runs of any model have left behind. Every rank of the pool calls it."""
        for transformer in self._transformers():
            transformer.forget_runs()

    def _transformers(self) -> list[ParallelTransformer | Stage]:
        structures = {id(each.structure): each.structure for each in self._residents.values()}.values()
        return [structure.transformer for structure in structures if structure is not None]

    def held(self) -> dict[str, int]:
        """Bytes on this rank's device by model; models with the same weights have them in common."""
        return {
            name: resident.size
            for name, resident in self._residents.items()
            if resident.held is not None and resident.held.weights.here
        }


def _is_stored_as(checkpoint: Checkpoint, dtype: torch.dtype) -> bool:
    return all(info.dtype == _FILE_DTYPES.get(dtype) for info in checkpoint.header.values())
