"""The VAEs of a rank by the client's names; their weights come and go with those of models (weight_store.py)."""

from __future__ import annotations

from collections import OrderedDict

from ..loading.files import identity
from ..requests.control import Control
from ..requests.requests import RunVae
from ..said import said
from ..vae.vae_weights import VaeWeights
from .loaded_model import LoadedModel
from .weight_store import WeightStore

_MOST = 4
"""VAEs that are known; which ones follows from the requests, so that all ranks know the same."""


class Vaes:
    """The VAEs of a rank.

    Args:
        store: of the weights of models, among which those of VAEs are.
    """

    def __init__(self, store: WeightStore):
        self._store = store
        self._held: OrderedDict[str, LoadedModel] = OrderedDict()

    def bring(self, request: RunVae, control: Control) -> LoadedModel:
        """The VAE of a request, on this rank's device.

        Raises:
            CheckpointError, UnsupportedModelError: ComfyUI cannot read its file.
            OutOfMemoryError: it does not fit.
            Cancelled: this rank heard of a cancel.
        """
        file = request.file
        stamp = identity(file.path)
        key = "vae", stamp, file.checkpoint, file.dtype
        known = self._held.get(request.vae)
        if known is not None and known.key != key:
            self._forget(request.vae)  # the file was replaced
            known = None
        if known is None:
            weights = VaeWeights(file, stamp, self._store.device)
            title = said("The VAE of {path}", path=file.path)
            known = LoadedModel(key, title, weights, file.size)
            self._store.add(known)
            self._held[request.vae] = known
        self._held.move_to_end(request.vae)
        while len(self._held) > _MOST:
            self._forget(next(iter(self._held)))
        self._store.activate(known, control.loading)
        return known

    def held(self) -> dict[str, int]:
        """Bytes on this rank's device by name."""
        return {name: held.weights.size for name, held in self._held.items() if held.weights.here}

    def give_back(self, name: str) -> int:
        """Let a VAE go, which a request brings again. Returns the bytes that it was."""
        known = self._held.get(name)
        return self._store.give_back(known) if known is not None else 0

    def _forget(self, name: str) -> None:
        self._store.forget(self._held.pop(name))
