"""The weight patches that a rank keeps, by the names of their contents. The client decides what is kept."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from ..errors import NotLoadedError
from ..requests.requests import KeepPatches
from .patch_data import NO_PATCHES, PatchSet, WeightPatches, as_bytes, read_set


class PatchStore:
    """Sets of patches and their factors, on the host: the device has those of a moment only."""

    def __init__(self) -> None:
        self._factors: dict[str, torch.Tensor] = {}
        self._sets: dict[str, PatchSet] = {}

    def keep(self, request: KeepPatches, tensors: Mapping[str, torch.Tensor]) -> None:
        """Do what a request says.

        Raises:
            RequestError: a set that is not what it says.
        """
        if request.kept is not None:
            self._sets = {name: each for name, each in self._sets.items() if name in request.kept}
            used = {factor for each in self._sets.values() for factor in each.factors}
            self._factors = {name: factor for name, factor in self._factors.items() if name in used}
        for name in request.factors:
            # A copy of its own: what the tensors came in goes.
            self._factors[name] = as_bytes(tensors[name].cpu()).clone()
        for name in request.sets:
            self._sets[name] = read_set(name, tensors[name], self._factors)

    def find(self, names: Sequence[str]) -> WeightPatches:
        """The patches of a request.

        Raises:
            NotLoadedError: they are not here.
        """
        if any(name and name not in self._sets for name in names):
            raise NotLoadedError("The workers do not have the LoRA's weights.", "Queue the prompt again.")
        patches, hooks = (self._sets[name] if name else NO_PATCHES for name in names)
        return WeightPatches(patches, hooks)
