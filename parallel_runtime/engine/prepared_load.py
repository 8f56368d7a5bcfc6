"""A load, prepared: the model is on the device, or was there already."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch

from ..acceleration import compiler
from ..config import ParallelConfig, ParallelPlan
from ..errors import CheckpointError
from ..mesh.agreement import agreed_same, offer_same
from ..planning.explanation import details_of, explain
from ..planning.plan import TYPICAL, plan_loading, resolve_plan, typical
from ..planning.weights_choice import choose_weights, ways_out
from ..requests.control import Control
from ..requests.facts import CPU, MachineFacts
from ..requests.requests import Answer, Load, Loaded
from ..said import said, together
from .measure import measure_machine
from .prepared import Prepared, Results
from .rank_state import RankState
from .resident import Resident

_FACTS = "facts"
"""All later plans are made from what a rank read of the file, so ranks that read something else stop at once."""


@dataclass(kw_only=True)
class PreparedLoad(Prepared):
    """See the module.

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
        about = request.ranks, opened.facts, machine, opened.weight_bytes
        config = choose_weights(config, *about)
        loaded = plan_loading(config, request.ranks, opened.facts, machine)
        resolve_plan(config, request.ranks, opened.facts, TYPICAL, machine, loaded)
        if state.device.type == "cuda" and config.compiles(on_gpu=True):
            compiler.get_ready()  # before weights come: its processes come up meanwhile
        place = state.meshes.place(loaded, opened.facts.mirrored) if loaded.pipe > 1 else None
        resident, reused = state.residency.load(
            request, config, opened, loaded, place, machine.memory_bytes, control, ways_out(config, *about)
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
        if not agreed_same(_FACTS, agreed):
            raise CheckpointError(
                said("The hosts have different models at {path}.", path=self.request.path),
                "Copy the same file to all of them.",
            )
        state, resident, machine = self.state, self.resident, self.machine
        if not machine.measured and machine.on_gpu:
            control.measuring()
        measured = machine if machine.measured else measure_machine(machine, state.device, state.world_size)
        state.machine = replace(measured, free_bytes=0)  # requests to come find other models here
        picture = typical(*self.request.size) if self.config.patches is None else TYPICAL
        wish = self.config, self.request.ranks, resident.facts, picture, measured, self.loaded
        explanation = explain(*wish)
        answer = Loaded(
            resident.family.name,
            resident.parameters,
            resident.size,
            self.reused,
            together((explanation, self.notes)),
            replace(state.machine, speeds=()),
            self.loaded.pipe,
            state.residency.held(),
            details_of(*wish),
        )
        return answer, {}

    def abandon(self) -> None:
        """Let a model go that was not here before."""
        if not self.reused:
            self.state.residency.forget(self.request.model)
