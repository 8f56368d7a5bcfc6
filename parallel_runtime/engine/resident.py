"""A model that requests can name: its facts, its configuration, and what this rank has of its modules and weights."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ..loading.reading import OnBytes, ignore
from ..mesh.agreement import NONE, offer_history
from ..mesh.mesh import Layout, Mesh
from ..networks.network import Network
from ..patching.patch_data import WeightPatches
from ..planning.cut import assign_blocks
from ..planning.wish import Wish
from ..requests.facts import ModelFacts
from .family import Family
from .loaded_model import LoadedModel
from .weight_store import WeightStore


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

    @property
    def size(self) -> int:
        """Bytes of weights that this rank has of it when they are on its device."""
        return 0 if self.loaded_model is None else self.loaded_model.weights.size

    def activate(self, on_bytes: OnBytes = ignore, patches: WeightPatches | None = None) -> None:
        """Have the weights on the device; see `WeightStore.activate`. Every use begins with it."""
        self.store.make_way(self.loaded_model.key if self.loaded_model is not None else None)
        if self.loaded_model is not None:
            self.store.activate(self.loaded_model, on_bytes, patches)

    def prepare_run(self, needs: int) -> None:
        """Let others go where a run may need so many bytes beside the weights; see `WeightStore`."""
        if self.loaded_model is not None:
            self.store.prepare_run(self.loaded_model, needs)

    def meet(self) -> None:
        """Before a forward: have what this rank reads of the others' weights. In RUN alone, where all ranks have
        activated them."""
        model = self.loaded_model
        if model is not None and model.weights.stream is not None and model.weights.stream.meet():
            # One rank alone let its share in the host's memory go and made it anew. Ranks that have recordings of their
            # own, over themselves alone or without that rank, had agreed to go on with these: all of them see it here.
            model.forget_recordings()

    def run_at(self, mesh: Mesh) -> Network:
        """Have the transformer run over a mesh: all its blocks, or those of this rank's stage, and others are put
        aside."""
        assert self.network is not None
        self.network.stages.run_as(self.owned(mesh) if mesh.plan.pipe > 1 else None)
        self.network.set_mesh(mesh)
        return self.network

    def offers(self, place: Layout) -> dict[str, int]:
        """What this rank has recorded for a request at such a place; the ranks must agree before they use it."""
        owned = self.owned(place) if place.plan.pipe > 1 else None
        if self.network is not None and self.network.stages.owned == owned:
            return self.network.offers(place)
        return offer_history(place.sequence_ranks, NONE)  # it will be wrapped anew

    def owned(self, place: Layout) -> tuple[int, int]:
        """(start, stop) of this rank's blocks at such a place."""
        if not self.wish.stage_ranks:
            return assign_blocks(self.facts.block_sizes, place.plan.pipe)[place.coordinate["pipe"]]
        assert self.network is not None
        assert self.network.stages.owned is not None
        return self.network.stages.owned

    def kept_bytes(self) -> int:
        """Bytes of keys and values that are here from the last run; the next one uses them or lets them go."""
        stage = None if self.network is None else self.network.stages.now
        return 0 if stage is None else sum(each.nbytes for each in stage.patch.kept)
