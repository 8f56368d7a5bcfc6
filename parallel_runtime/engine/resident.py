"""A model that requests can name: its facts, its configuration, and what this rank has of its modules and weights."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable
from dataclasses import dataclass

import torch

from ..config import ParallelConfig, ParallelPlan
from ..loading.reading import OnBytes
from ..mesh.agreement import offer_nothing
from ..mesh.mesh import Mesh
from ..networks.network import Network
from ..patching.patch_data import WeightPatches
from ..planning.cut import assign_blocks
from ..requests.facts import ModelFacts
from .family import Family
from .held import Held
from .plan_meshes import Place
from .structure import Structure


@dataclass
class Resident:
    """A model as a client asked for it.

    Args:
        key: the client's name for it.
        facts: what plans are made from.
        loaded: the plan whose stages share out the weights; of one stage where every rank holds all.
        structure: its modules, shared with residents that are wrapped alike; None on a rank that the configuration
            does not use.
        held: its weights, shared with residents of the same weights; None as `structure`.
        make_way: see `WeightStore`.
    """

    key: str
    family: Family
    config: ParallelConfig
    ranks: int
    dtype: torch.dtype
    facts: ModelFacts
    loaded: ParallelPlan
    structure: Structure | None
    held: Held | None = None
    make_way: Callable[[Hashable], None] = lambda key: None

    @property
    def transformer(self) -> Network | None:
        """As it is wrapped for the last request; None on a rank that the configuration does not use."""
        return None if self.structure is None else self.structure.transformer

    @property
    def parameters(self) -> int:
        """Parameters that this rank has of it."""
        return 0 if self.structure is None else self.structure.parameters

    @property
    def size(self) -> int:
        """Bytes of weights that this rank has of it when they are on its device."""
        return 0 if self.held is None else self.held.weights.size

    @property
    def dropped(self) -> bool:
        """Whether bringing the weights back would mean to read files."""
        return self.held is not None and not self.held.weights.here

    def activate(
        self,
        on_bytes: OnBytes = lambda done, total: None,
        patches: WeightPatches | None = None,
    ) -> None:
        """Have the weights on the device; costs nothing where they are. Every use begins with it.

        Args:
            patches: that they are to have; None for any.

        Raises:
            As `Held.activate`.
        """
        self.make_way(self.held.key if self.held is not None else None)
        if self.held is not None:
            self.held.activate(on_bytes, patches)

    def meet(self) -> None:
        """Before a forward: have what this rank reads of the others' weights. In RUN alone, where all ranks have
        activated them."""
        if self.held is not None and self.held.weights.stream is not None and self.held.weights.stream.meet():
            # One rank alone let its share in the host's memory go and made it anew. Ranks that have recordings of their
            # own, over themselves alone or without that rank, had agreed to go on with these: all of them see it here.
            self.held.forget_recordings()

    def wrap_whole(self) -> Network:
        """Have the transformer with all its blocks, to be run over any mesh without stages."""
        assert self.structure is not None
        return self.structure.wrap_whole()

    def wrap_stage(self, place: Place, mesh: Mesh) -> Network:
        """Have this rank's stage of it. Blocks of other stages, where the rank holds them, are put aside."""
        assert self.structure is not None
        return self.structure.wrap_stage(self.owned(place), mesh)

    def offers(self, place: Place) -> dict[str, int]:
        """What this rank has recorded for a request at such a place; the ranks must agree before they use it."""
        current, stages = self.transformer, place.layout.plan.pipe > 1
        owned = self.owned(place) if stages else None
        if current is not None and current.owned == owned:
            return current.offers(place.layout)
        return offer_nothing(place.layout.sequence_ranks)  # it will be wrapped anew

    def owned(self, place: Place) -> tuple[int, int]:
        """(start, stop) of this rank's blocks at such a place."""
        if self.loaded.pipe > 1:
            owned = self.transformer.owned if self.transformer is not None else None
            assert owned is not None
            return owned
        return owned_blocks(self.facts, place)

    def kept_bytes(self) -> int:
        """Bytes of keys and values that are here from the last run; the next one uses them or lets them go."""
        return 0 if self.structure is None else self.structure.kept_bytes()


def owned_blocks(facts: ModelFacts, place: Place, most: float = math.inf) -> tuple[int, int]:
    """This rank's blocks by the assignment that plans reckon with."""
    plan = place.layout.plan
    stages = assign_blocks(facts.block_sizes, plan.pipe, most, place.stage_speeds)
    return stages[place.layout.coordinate["pipe"]]
