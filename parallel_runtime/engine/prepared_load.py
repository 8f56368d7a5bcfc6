"""A model's life on a rank, prepared: a survey of what a load would take, the load, and the release."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch

from ..config import ParallelConfig, ParallelPlan
from ..mesh.agreement import offer_same
from ..planning.explanation import details_of, explain
from ..planning.plan import choose, plan_loading
from ..planning.weights_choice import choose_weights, ways_out
from ..planning.wish import TYPICAL, Wish, typical
from ..requests.control import Control
from ..requests.facts import CPU, MachineFacts
from ..requests.requests import Answer, Finished, Load, Loaded, Release, Survey, Surveyed
from ..said import together
from .measure import measure_machine
from .prepared import Prepared, Results, require_same
from .rank_state import RankState
from .resident import Resident

_FREE = "free on {}"
_STEP = 512 << 20
"""What is free counts in whole ones, so that a little more or less of it makes no other plan."""


@dataclass(kw_only=True)
class PreparedSurvey(Prepared):
    """What a load would take.

    Args:
        needs: bytes of weights.
    """

    state: RankState
    request: Survey
    needs: int

    @classmethod
    def prepare(cls, state: RankState, request: Survey) -> PreparedSurvey:
        """Open the file, and offer what this rank has.

        Raises:
            ParallelError: as the load would.
        """
        load = request.load
        config = ParallelConfig.from_mapping(load.config)
        machine = replace(load.machine or CPU, speeds=tuple(state.meshes.speeds or ()), free_each=())
        opened = state.open(load)
        facts, weight_bytes = opened.facts, opened.weight_bytes
        wish = Wish(config, load.ranks, facts, TYPICAL, machine)
        cost = choose(replace(wish, config=choose_weights(wish, weight_bytes))).cost
        needs = int(cost.weight_bytes * weight_bytes / (facts.parameters * facts.bytes_per_parameter))
        # A rank that the model does not use may be as full as it likes.
        used = state.rank < load.ranks
        offers = {_FREE.format(state.rank): state.residency.store.could_have()} if used else {}
        return cls(state=state, request=request, needs=needs, offers=offers)

    def work(
        self, tensors: Mapping[str, torch.Tensor], control: Control, agreed: Mapping[str, int]
    ) -> tuple[Answer, Results]:
        """Tell what each rank has."""
        held = self.state.held()
        needs = 0 if self.request.load.model in held else self.needs
        each = (agreed[_FREE.format(rank)] for rank in range(self.request.load.ranks))
        return Surveyed(tuple(max(1, free // _STEP * _STEP) for free in each), needs, held), {}


_FACTS = "facts"
"""All later plans are made from what a rank read of the file, so ranks that read something else stop at once."""


@dataclass(kw_only=True)
class PreparedLoad(Prepared):
    """The model comes to the devices, or is there already.

    Args:
        machine: as the request tells of it; measured in the run where nobody has measured it yet.
        loaded: the plan that shares out the weights.
        reused: the model's modules were here already.
        notes: what the artist should know of the network, a sentence or "".
    """

    state: RankState
    request: Load
    config: ParallelConfig
    machine: MachineFacts
    loaded: ParallelPlan
    resident: Resident
    reused: bool
    notes: str

    @classmethod
    def prepare(cls, state: RankState, request: Load, control: Control) -> PreparedLoad:
        """Open the file, plan, and have the weights on the device.

        Raises:
            ParallelError: with cause and fix.
            Cancelled: this rank heard of a cancel.
        """
        config = ParallelConfig.from_mapping(request.config)
        # The same on every rank: from the request, and from the collective that an engine starts with.
        machine = replace(request.machine or CPU, speeds=tuple(state.meshes.speeds or ()))
        # Whatever fails on all ranks alike comes before any model is let go.
        opened = state.take_opened(request)
        wish = Wish(config, request.ranks, opened.facts, TYPICAL, machine)
        config = choose_weights(wish, opened.weight_bytes)
        wish = replace(wish, config=config)
        loaded = plan_loading(wish)
        choose(replace(wish, loaded=loaded))
        place = state.meshes.place(loaded) if loaded.pipe > 1 else None
        resident, reused = state.residency.load(
            request, config, opened, loaded, place, machine.memory_bytes, control, ways_out(wish, opened.weight_bytes)
        )
        return cls(
            state=state,
            request=request,
            config=config,
            machine=machine,
            loaded=loaded,
            resident=resident,
            reused=reused,
            notes=opened.notes,
            offers=offer_same(_FACTS, resident.facts),
        )

    def work(
        self, tensors: Mapping[str, torch.Tensor], control: Control, agreed: Mapping[str, int]
    ) -> tuple[Answer, Results]:
        """Measure what was not measured yet, and tell of the model."""
        require_same(_FACTS, agreed, self.request.path)
        state, resident, machine = self.state, self.resident, self.machine
        if not machine.measured and machine.on_gpu:
            control.measuring()
        measured = machine if machine.measured else measure_machine(machine, state.device, state.world_size)
        state.machine = replace(measured, free_each=())  # requests to come find other models here
        picture = typical(*self.request.size) if self.config.patches is None else TYPICAL
        wish = Wish(self.config, self.request.ranks, resident.facts, picture, measured, self.loaded)
        answer = Loaded(
            resident.family.name,
            resident.parameters,
            resident.size,
            self.reused,
            together((explain(wish), self.notes)),
            replace(state.machine, speeds=()),
            self.loaded.pipe,
            state.held(),
            details_of(wish),
        )
        return answer, {}

    def abandon(self) -> None:
        """Let a model go that was not here before."""
        if not self.reused:
            self.state.residency.forget(self.request.model)


_UNLOADED = "unloaded"
"""A rank offers 1 where a `Release` leaves it no model: peer memory goes when none is left on any."""


@dataclass(kw_only=True)
class PreparedRelease(Prepared):
    """A model leaves the devices, or goes to the host's memory."""

    state: RankState
    request: Release

    @classmethod
    def prepare(cls, state: RankState, request: Release) -> PreparedRelease:
        """Nothing goes before all ranks are ready."""
        last = not state.residency.has_others(request.model)
        return cls(state=state, request=request, offers={_UNLOADED: int(last)})

    def work(
        self, tensors: Mapping[str, torch.Tensor], control: Control, agreed: Mapping[str, int]
    ) -> tuple[Answer, Results]:
        """Return the memory to the system."""
        state = self.state
        state.forget_requests()
        if agreed[_UNLOADED]:
            state.meshes.free_memory()
            state.residency.forget_runs()
        freed = state.residency.give_back(self.request.model, self.request.park)
        freed += state.vaes.give_back(self.request.model)
        return Finished(bytes_freed=freed, held=state.held()), {}
