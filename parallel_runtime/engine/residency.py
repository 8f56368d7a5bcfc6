"""The models and VAEs of a rank by the client's names: what it has of each, loading them, and letting them go."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from pathlib import Path

import torch

from ..config import STREAMED
from ..errors import NotLoadedError
from ..loading.files import identity
from ..loading.reading import OnBytes, Owned, ignore
from ..mesh.agreement import NONE, offer_history
from ..mesh.mesh import Layout, Mesh
from ..networks.marked_blocks import Pulse
from ..networks.network import Network
from ..patching.patch_data import WeightPatches
from ..planning.cut import assign_blocks, most_parameters
from ..planning.weights_choice import ways_out
from ..planning.wish import Wish
from ..requests.control import Control
from ..requests.facts import ModelFacts
from ..requests.requests import Load, RunVae
from ..said import said
from ..streaming.dealer import Dealer
from ..vae.vae_weights import VaeWeights
from .opened import Family, Opened
from .weight_store import LoadedModel, WeightStore

MOST = 8
"""Models with their configurations that are kept, with what was compiled of them, whether their weights are there or
not. Which ones follows from the requests, so that all ranks keep the same."""
_MOST_VAES = 4  # the same of VAEs


@dataclass
class Resident:
    """A model as a client asked for it."""

    family: Family
    wish: Wish  # what it was loaded for; the plan `loaded` has one stage where every rank holds all weights
    dtype: torch.dtype
    store: WeightStore  # of its weights
    # What runs it, shared with those of equal options; None on a rank that the configuration does not use.
    network: Network | None = None
    loaded_model: LoadedModel | None = None  # its weights, shared with all that have the same; None as `network`

    @property
    def facts(self) -> ModelFacts:
        """What plans are made from."""
        return self.wish.model

    def activate(self, on_bytes: OnBytes = ignore, patches: WeightPatches | None = None) -> None:
        """Have the weights on the device; see `WeightStore.activate`. Every use begins with it."""
        self.store.make_way(self.loaded_model.key if self.loaded_model is not None else None)
        if self.loaded_model is not None:
            self.store.activate(self.loaded_model, on_bytes, patches)

    def meet(self) -> None:
        """Before a forward, in RUN alone: have what this rank reads of the others' weights, all of them activated."""
        model = self.loaded_model
        if model is not None and model.weights.stream is not None and model.weights.stream.meet():
            # One rank alone let its share in the host's memory go and made it anew. Ranks that have recordings of their
            # own, over themselves alone or without that rank, had agreed to go on with these: all of them see it here.
            model.forget_recordings()

    def run_at(self, mesh: Mesh) -> Network:
        """Have the transformer run over a mesh, with all its blocks or those of this rank's stage."""
        assert self.network is not None
        self.network.stages.run_as(self.owned(mesh))
        self.network.set_mesh(mesh)
        return self.network

    def offers(self, place: Layout) -> dict[str, int]:
        """What this rank has recorded for a request at such a place; the ranks must agree before they use it."""
        if self.network is not None and self.network.stages.owned == self.owned(place):
            return self.network.offers(place)
        return offer_history(place.sequence_ranks, NONE)  # it will be wrapped anew

    def owned(self, place: Layout) -> Owned:
        """(start, stop) of this rank's blocks at such a place; None: all."""
        if place.plan.pipe == 1:
            return None
        if not self.wish.stage_ranks:
            return assign_blocks(self.facts.block_sizes, place.plan.pipe)[place.coordinate["pipe"]]
        assert self.network is not None
        return self.network.stages.owned

    def kept_bytes(self) -> int:
        """Bytes of keys and values that are here from the last run; the next one uses them or lets them go."""
        stage = None if self.network is None else self.network.stages.now
        return 0 if stage is None else sum(each.nbytes for each in stage.patch.kept)


class Residency:
    """The models and VAEs of a rank. Which weights are on the device is the store's affair."""

    def __init__(self, device: torch.device, rank: int, folder: Path | None = None):
        self._device, self._rank, self._folder = device, rank, folder
        self.store = WeightStore(device, rank, folder)
        self.pulse = Pulse(device)
        self._residents: OrderedDict[str, Resident] = OrderedDict()
        self._vaes: dict[str, LoadedModel] = {}

    def get(self, key: str) -> Resident:
        """The model of that name, its weights on the device or not; NotLoadedError where it is not known."""
        if key not in self._residents:
            raise NotLoadedError("The model is not loaded in the workers.", "Queue the prompt again.")
        self._residents.move_to_end(key)
        return self._residents[key]

    def load(
        self, request: Load, wish: Wish, opened: Opened, place: Layout | None, control: Control
    ) -> tuple[Resident, bool]:
        """Have a model on the device; return it, and whether its modules were here already. `place` is that in
        `wish.loaded` where it has several stages, None on a rank outside of it. Errors as of `Opened.weights` and
        `WeightStore.activate`; Cancelled where this rank heard of a cancel."""
        loaded, owned = wish.loaded, None
        assert loaded is not None
        if place is not None:  # the assignment is that which plans reckon with
            most = most_parameters(wish.machine.memory_bytes, opened.dtype.itemsize)
            owned = assign_blocks(opened.facts.block_sizes, loaded.pipe, most)[place.coordinate["pipe"]]
        dealer = self._dealer(request, wish, opened)
        key = (opened.identity, loaded.pipe, owned) if dealer is None else dealer.key
        # Every rank alike, also one that the model does not use.
        self.store.make_way(key)
        known = self._model(request.model)
        if known is not None and known.key != key:
            self.forget(request.model)  # the file was replaced
        used = self._rank < request.ranks and (loaded.pipe == 1 or owned is not None)
        model = self.store.models.get(key) if used else None
        network, reused = None, model is not None or not used
        if used and model is None:
            title = opened.title if dealer is None else f"{opened.title} ({dealer.mode})"
            weights = opened.weights(owned, self._device, dealer)
            model = self.store.models[key] = LoadedModel(key, title, weights, opened.costs(owned, dealer))
        if model is not None:
            try:
                network = self._run(model, wish, opened, control)
            except BaseException:
                if not reused:
                    self.store.forget(model)
                raise
        resident = Resident(opened.family, wish, opened.dtype, self.store, network, model)
        self._residents[request.model] = resident
        self._residents.move_to_end(request.model)
        while len(self._residents) > MOST:
            self.forget(next(iter(self._residents)))
        return resident, reused

    def _dealer(self, request: Load, wish: Wish, opened: Opened) -> Dealer | None:
        """Who deals the blocks out where they come one after the other; raises as `Dealer.check`."""
        config, ranks = wish.config, request.ranks
        if config.weights not in STREAMED:
            return None
        key = (opened.identity, config.weights, ranks, config.resident, config.held)
        held = config.held[self._rank] if self._rank < len(config.held) else 0
        dealer = Dealer(config.weights, self._rank, ranks, self._folder, key, self._device, config.resident, held)
        dealer.check()
        return dealer

    def _run(self, model: LoadedModel, wish: Wish, opened: Opened, control: Control) -> Network:
        """Have the weights on the device, and what runs with them by the configuration."""
        smaller = [*opened.smaller(model.costs, self._device), *ways_out(wish, opened.weight_bytes)]
        self.store.activate(model, control.loading, smaller=smaller)
        on_gpu = self._device.type == "cuda"
        options = wish.config.attention, wish.config.compiles(on_gpu)
        if options not in model.networks:
            if on_gpu:
                control.measuring()  # which attention kernel is the fastest, where nobody knows yet
            model.networks[options] = opened.network(model.weights, options, self.pulse)
        return model.networks[options]

    def load_vae(self, request: RunVae, control: Control) -> LoadedModel:
        """Have the VAE of a request on the device. Raises as `load`."""
        file = request.file
        stamp = identity(file.path)
        key = "vae", stamp, file.checkpoint, file.dtype
        known = self._vaes.pop(request.vae, None)
        if known is not None and known.key != key:
            self.store.forget(known)  # the file was replaced
            known = None
        if known is None:
            weights = VaeWeights(file, stamp, self._device)
            known = LoadedModel(key, said("The VAE of {path}", path=file.path), weights, file.size)
            self.store.models[key] = known
        self._vaes[request.vae] = known
        while len(self._vaes) > _MOST_VAES:
            self.store.forget(self._vaes.pop(next(iter(self._vaes))))
        self.store.activate(known, control.loading)
        return known

    def forget(self, name: str) -> None:
        """Let a model go for good, but for what others have in common with it. Every rank calls it."""
        resident = self._residents.pop(name, None)
        if resident is None or resident.loaded_model is None:
            return
        model = resident.loaded_model
        used = [other.network for other in self._residents.values() if other.loaded_model is model]
        if not used:
            self.store.forget(model)
        model.networks = {options: network for options, network in model.networks.items() if network in used}

    def give_back(self, name: str, park: bool = False) -> int:
        """Return a model's or VAE's weights to the system, on every rank; their bytes. See `WeightStore.give_back`."""
        model = self._model(name)
        freed = self.store.give_back(model, park) if model is not None else 0
        if name in self._vaes:
            freed += self.store.give_back(self._vaes[name])
        self.store.clean()
        return freed

    def has_others(self, name: str) -> bool:
        """Whether weights of other models than this one are on the device."""
        own = self._model(name)
        models = (resident.loaded_model for resident in self._residents.values())
        return any(each is not None and each is not own and each.weights.here for each in models)

    def _model(self, name: str) -> LoadedModel | None:
        return self._residents[name].loaded_model if name in self._residents else None

    def leave(self, mesh: Mesh) -> None:
        """Let go of what was recorded over a mesh whose groups will be gone. Every rank of the mesh calls it."""
        for network in self._networks():
            network.leave(mesh)
        for vae in self._vaes.values():
            assert isinstance(vae.weights, VaeWeights)
            vae.weights.recorded.leave(mesh)

    def forget_runs(self) -> None:
        """Let go of what runs of any model have left behind. Every rank of the pool calls it."""
        for network in self._networks():
            network.forget_runs()
        for vae in self._vaes.values():
            assert isinstance(vae.weights, VaeWeights)
            vae.weights.forget_runs()

    def _networks(self) -> list[Network]:
        return list(dict.fromkeys(each.network for each in self._residents.values() if each.network is not None))

    def held(self) -> dict[str, int]:
        """Bytes of weights on this rank's device by model and VAE; models may have them in common."""
        models = {name: resident.loaded_model for name, resident in self._residents.items()} | self._vaes
        return {name: model.weights.size for name, model in models.items() if model is not None and model.weights.here}
