"""The engine of one rank: prepares and runs requests. Under the pool, or under plain torchrun from a script.

`prepare` makes no collective call, so a rank that fails there leaves nobody waiting: it knows a rank's place in a plan,
and the groups of the plan are joined when all ranks run.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from ..acceleration.peer_memory import PeerMemory
from ..config import ParallelConfig, ParallelPlan
from ..denoising.denoise import Denoising
from ..denoising.predict import Call, Predictor
from ..errors import CheckpointError, NotLoadedError, RequestError
from ..mesh.agreement import agreed_same, offer_same
from ..mesh.groups import names_used
from ..mesh.mesh import Mesh
from ..mesh.speeds import devices_unlike, measure_speeds
from ..pipefusion.denoise import PipelineDenoising, forward_once, sit_out
from ..pipefusion.kept import kept_bytes
from ..pipefusion.runner import Part, StageRunner, lay_out
from ..planning.describe import describe_request
from ..planning.explanation import explain, what_runs
from ..planning.limits import check_steps
from ..planning.plan import TYPICAL, plan_loading, resolve_plan
from ..requests.conditioning import Conditioning, ConditioningStore, check_arguments
from ..requests.control import Cancelled, Control
from ..requests.facts import CPU, MachineFacts, RequestFacts
from ..requests.requests import (
    Answer,
    ConditioningRef,
    Finished,
    Forward,
    Grow,
    Grown,
    Load,
    Loaded,
    Release,
    Request,
    Sample,
    Step,
)
from ..sampling.samplers import require_patchwise
from .measure import measure_machine
from .memory_checks import require_room
from .plan_meshes import Joined, Meshes, Place
from .residency import Residency
from .resident import Opened, Resident

Results = dict[str, torch.Tensor]

_FACTS = "facts"
"""All later plans are made from what a rank read of the file, so ranks that read something else stop at once."""
_UNLOADED = "unloaded"
"""A rank offers 1 where a `Release` leaves it no model: peer memory goes when none is left on any."""
_NAMES = "names of groups"
"""A rank offers the negative of how many it has used: the groups of a larger world get names that are new to all."""


@dataclass
class Prepared:
    """A request that this rank is ready to run. `run` is called on all ranks or on none.

    Args:
        work: (tensors, control, agreed) -> answer and results.
        offers: what this rank has or can do where ranks may differ and must act alike; `agreed` is the least of all
            ranks' offers under each name.
    """

    work: Callable[[Mapping[str, torch.Tensor], Control, Mapping[str, int]], tuple[Answer, Results]]
    undo: Callable[[], Any] = lambda: None
    offers: Mapping[str, int] = field(default_factory=dict)
    cancelled: bool = False

    def run(
        self, tensors: Mapping[str, torch.Tensor], control: Control, agreed: Mapping[str, int] | None = None
    ) -> tuple[Answer, Results]:
        """Run; `tensors` are on this rank's device. Sets `cancelled` where the ranks agreed to stop.

        Args:
            agreed: None where this rank is the only one, and what it offers holds.
        """
        try:
            return self.work(tensors, control, self.offers if agreed is None else agreed)
        except Cancelled:
            self.cancelled = True
            return Finished(), {}

    def abandon(self) -> None:
        """Another rank could not prepare: undo."""
        self.undo()


class Engine:
    """One rank's engine.

    Args:
        device: where this rank computes.
        rank, world_size: place in the default process group; one rank needs none. A rank that will meet others is a
            world of its own until then, whatever its number.
    """

    def __init__(self, device: torch.device, rank: int, world_size: int):
        self.device = device
        self.rank = rank
        self.world_size = 1
        self.meet: Callable[[tuple[int, ...], int], None] | None = None
        """(devices, first name of a group): leaves the default process group and joins one of all ranks with these
        devices; collective over them. None where nobody can start more ranks."""
        pool = os.environ.get("PARALLEL_DIT_POOL")  # its private folder on this host; a script has none
        self.residency = Residency(device, rank, folder=Path(pool) if pool else None)
        self.conditionings = ConditioningStore()
        # Prepared calls by kind. The client decides what is kept, so that all ranks keep the same.
        self._kinds: dict[int, Prepared] = {}
        self._told: dict[str, int] | None = None  # what the client knows of the weights that are here
        # Ranks plan by it, so it is the same on all of them: from the Load request, or out of a collective.
        self.machine: MachineFacts = CPU
        self._unlike = False
        self._meshes = Meshes(rank, 1, leave=self.residency.leave, share=PeerMemory)
        self._enter_world(world_size)

    def _enter_world(self, world_size: int) -> None:
        """Collective: every rank does so, when its engine starts, or in the same request."""
        self.world_size = world_size
        self._unlike = devices_unlike(self.device, world_size)
        self._meshes.enter_world(world_size, measure_speeds(self.device, world_size))

    def prepare(self, request: Request, meta: Mapping[str, torch.Tensor], control: Control) -> Prepared:
        """Validate, plan, load.

        Args:
            meta: the request's tensors on the meta device.

        Raises:
            ParallelError: typed, with cause and fix; nothing has changed but which models are on the device.
            Cancelled: this rank heard of a cancel while it loaded.
        """
        if isinstance(request, Load):
            return self._prepare_load(request, control)
        if isinstance(request, Release):
            return self._prepare_release(request)
        if isinstance(request, Step):
            return self.recall(request)
        if isinstance(request, Grow):
            return self._prepare_grow(request)
        self._told = None  # the answer to a request that was prepared tells all
        resident = self.residency.get(request.model)
        resident.activate(control.loading)
        if isinstance(request, Forward):
            return self._prepare_forward(request, resident, meta)
        return self._prepare_sample(request, resident, meta)

    def recall(self, step: Step) -> Prepared:
        """A call that an earlier `Forward` prepared.

        Raises:
            NotLoadedError: none of that number is kept, on any rank: see `forget_calls`.
        """
        if step.kind not in self._kinds:
            raise NotLoadedError(f"The pool keeps no call of number {step.kind}.", "Queue the prompt again.")
        return self._kinds[step.kind]

    def forget_calls(self) -> None:
        """Let go of what `recall` finds. Every rank does so when a request was refused in PREPARE: the rank that
        refused it may have lost its own (`free`), and all have to keep the same."""
        self._kinds.clear()

    def _prepare_load(self, request: Load, control: Control) -> Prepared:
        config = ParallelConfig.from_mapping(request.config)
        # The same on every rank: from the request, and from the collective that an engine starts with.
        machine = replace(request.machine or CPU, speeds=tuple(self._meshes.speeds or ()))
        # Whatever fails on all ranks alike comes before any model is let go.
        opened = Opened.open(request)
        loaded = plan_loading(config, request.ranks, opened.facts, machine)
        resolve_plan(config, request.ranks, opened.facts, TYPICAL, machine, loaded)
        place = self._meshes.place(loaded, opened.facts.mirrored) if loaded.pipe > 1 else None
        resident, reused = self.residency.load(request, config, opened, loaded, place, machine.memory_bytes, control)

        def work(
            tensors: Mapping[str, torch.Tensor], control: Control, agreed: Mapping[str, int]
        ) -> tuple[Answer, Results]:
            if not agreed_same(_FACTS, agreed):
                raise CheckpointError(
                    f"The hosts have different models at {request.path}.", "Copy the same file to all of them."
                )
            self.machine = machine if machine.measured else measure_machine(machine, self.device, self.world_size)
            answer = Loaded(
                resident.spec.name,
                resident.parameters,
                resident.size,
                reused,
                explain(config, request.ranks, resident.facts, TYPICAL, self.machine, loaded),
                replace(self.machine, speeds=()),
                loaded.pipe,
                self.residency.held(),
            )
            return answer, {}

        undo = lambda: None if reused else self.residency.forget(request.model)  # noqa: E731
        return Prepared(work, undo, offer_same(_FACTS, resident.facts))

    def _prepare_release(self, request: Release) -> Prepared:
        def work(
            tensors: Mapping[str, torch.Tensor], control: Control, agreed: Mapping[str, int]
        ) -> tuple[Answer, Results]:
            self._forget_all()
            if agreed[_UNLOADED]:
                self._meshes.free_memory()
                self.residency.forget_runs()
            freed = self.residency.give_back(request.model)
            return Finished(bytes_freed=freed, held=self.residency.held()), {}

        return Prepared(work, offers={_UNLOADED: int(not self.residency.has_others(request.model))})

    def _prepare_grow(self, request: Grow) -> Prepared:
        meet = self.meet
        if meet is None:
            raise RequestError("Ranks that were started from a script take in no others.", "Start more of them.")

        def work(
            tensors: Mapping[str, torch.Tensor], control: Control, agreed: Mapping[str, int]
        ) -> tuple[Answer, Results]:
            self._forget_all()
            self._meshes.free_memory()
            self.residency.leave_world()
            meet(request.devices, -agreed[_NAMES])
            self._enter_world(len(request.devices))
            return Grown(request.devices, self.residency.held()), {}

        return Prepared(work, offers={_NAMES: -names_used()})

    def free(self) -> None:
        """After an allocation failed on this rank: give back what it holds, so that the next request finds memory."""
        self._forget_all()
        self.residency.store.free()

    def _forget_all(self) -> None:
        self._kinds.clear()
        self.conditionings.clear()

    def _prepare_forward(self, request: Forward, resident: Resident, meta: Mapping[str, torch.Tensor]) -> Prepared:
        x = meta["x"]
        text = self._check(request.conditioning, resident, x, meta)
        facts = describe_request(resident.spec, tuple(x.shape), text, batch=x.shape[0])
        place, plan = self._place(resident, facts)
        says = self._what_runs(resident, facts)
        if place is not None:
            if plan.pipe > 1:
                self._lay_out((request.conditioning,), resident, place, 1, x, meta)
            require_room(resident, place.layout, facts, x.shape[0], 0, self.device, self.rank)

        def work(
            tensors: Mapping[str, torch.Tensor], control: Control, agreed: Mapping[str, int]
        ) -> tuple[Answer, Results]:
            self.conditionings.drop(request.dropped)
            for kind in request.dropped_kinds:
                self._kinds.pop(kind, None)
            conditioning = self.conditionings.take(request.conditioning, tensors)
            repeated = partial(self._forward, resident, place, plan, says, conditioning)
            if request.kind:
                self._kinds[request.kind] = Prepared(repeated)
            return repeated(tensors, control, agreed)

        return Prepared(work, offers=resident.offers(place) if place is not None else {})

    def _forward(
        self,
        resident: Resident,
        place: Place | None,
        plan: ParallelPlan,
        says: str,
        conditioning: Conditioning,
        tensors: Mapping[str, torch.Tensor],
        control: Control,
        agreed: Mapping[str, int],
    ) -> tuple[Answer, Results]:
        """One call of the transformer. All that is there to run it was prepared."""
        started = time.perf_counter()
        resident.activate()  # models that were prepared since may have taken its place
        results: Results = {}
        joined = self._join(resident, place, plan, agreed, control)
        if joined is not None and joined.links is not None:
            runner = StageRunner(resident.staged, joined.links, [conditioning], tensors["x"], patches=1, keep=False)
            output = forward_once(runner, tensors["x"], tensors["timestep"])
            results = {} if output is None else {"output": output}
        elif joined is not None:
            call = Call(tensors["x"], tensors["timestep"], conditioning)
            results["output"] = self._predictor(resident, joined.mesh)([call])[0]
        return self._finished(says, started), results

    def _prepare_sample(self, request: Sample, resident: Resident, meta: Mapping[str, torch.Tensor]) -> Prepared:
        x = meta["x"]
        denoising = Denoising(request, resident.dtype, self._unlike)
        denoising.check(meta, self.device)
        texts = [
            self._check(branch, resident, seen, meta)
            for branch, seen in zip(request.branches, denoising.model_inputs(x, meta), strict=True)
        ]
        steps, batch = meta["sigmas"].shape[0] - 1, x.shape[0] * len(request.branches)
        longest = max(texts, key=lambda shape: shape[1])
        facts = describe_request(resident.spec, tuple(x.shape), longest, batch=batch, steps=steps)
        place, plan = self._place(resident, facts)
        says = self._what_runs(resident, facts)
        check_steps(plan, steps)
        kept = 0
        if plan.pipe > 1:
            denoising.require_noise_of_first_rank()
            if plan.patches > 1:
                require_patchwise(denoising.sampler)
            if place is not None:
                parts = self._lay_out(request.branches, resident, place, plan.patches, x, meta)
                kept = kept_bytes(resident.facts, resident.owned(place), place.layout, parts)
        if place is not None:
            require_room(resident, place.layout, facts, x.shape[0], kept, self.device, self.rank)

        def work(
            tensors: Mapping[str, torch.Tensor], control: Control, agreed: Mapping[str, int]
        ) -> tuple[Answer, Results]:
            started = time.perf_counter()
            self.conditionings.drop(request.dropped)
            branches = [self.conditionings.take(branch, tensors) for branch in request.branches]
            joined = self._join(resident, place, plan, agreed, control)
            if joined is None:
                (sit_out if plan.pipe > 1 else denoising.sit_out)(steps, control)
                return self._finished(says, started), {}
            if joined.links is None:
                latent = denoising.run(self._predictor(resident, joined.mesh), branches, tensors, control)
                return self._finished(says, started), {"latent": latent}
            seen = denoising.model_inputs(tensors["x"], tensors)[0]
            runner = StageRunner(resident.staged, joined.links, branches, seen, plan.patches, keep=True)
            finished = PipelineDenoising(denoising, runner, plan.warmup_steps, tensors, control).run()
            return self._finished(says, started), {} if finished is None else {"latent": finished}

        return Prepared(work, offers=resident.offers(place) if place is not None else {})

    def _check(
        self, reference: ConditioningRef, resident: Resident, x: torch.Tensor, meta: Mapping[str, torch.Tensor]
    ) -> tuple[int, ...]:
        """Refuse what the model cannot take; return the shape of the text."""
        conditioning = self.conditionings.peek(reference, meta)
        check_arguments(conditioning, resident.spec, resident.model_config, x.shape[0])
        shapes = conditioning.on_meta()
        timestep = torch.empty(x.shape[0], device="meta")
        arguments = resident.spec.adapter.to_transformer(
            x, timestep, shapes.context, resident.model_config, **shapes.extras
        )
        resident.spec.check_widths(arguments, resident.model_config)
        return tuple(conditioning.context.shape)

    def _lay_out(
        self,
        references: Sequence[ConditioningRef],
        resident: Resident,
        place: Place,
        patches: int,
        x: torch.Tensor,
        meta: Mapping[str, torch.Tensor],
    ) -> tuple[Part, ...]:
        """Refuse a latent that cannot be cut into so many patches; return this rank's forwards."""
        branches = [self.conditionings.peek(reference, meta) for reference in references]
        return lay_out(resident.spec, resident.model_config, place.layout, branches, x, patches)[1]

    def _place(self, resident: Resident, request: RequestFacts) -> tuple[Place | None, ParallelPlan]:
        """The place for such a request, and its plan, the same on all ranks. Makes no collective call."""
        facts = resident.facts
        plan = resolve_plan(resident.config, resident.ranks, facts, request, self.machine, resident.loaded)
        place = self._meshes.place(plan, facts.mirrored and plan.pipe > 1)
        if place is not None and resident.transformer is not None:
            resident.transformer.check_ring(place.layout)
        return place, plan

    def _what_runs(self, resident: Resident, request: RequestFacts) -> str:
        return what_runs(resident.config, resident.ranks, resident.facts, request, self.machine, resident.loaded)

    def _join(
        self,
        resident: Resident,
        place: Place | None,
        plan: ParallelPlan,
        agreed: Mapping[str, int],
        control: Control,
    ) -> Joined | None:
        """Join the groups of a plan, and wrap the model for it. Collective over the world where groups are new."""
        joined = self._meshes.join(plan, resident.facts.mirrored and plan.pipe > 1)
        if place is not None and joined is not None:
            transformer = resident.whole() if joined.links is None else resident.stage(place, joined.mesh)
            transformer.set_mesh(joined.mesh)
            transformer.go_on(agreed)
            transformer.before_compiling = control.before_compiling
        return joined

    def _predictor(self, resident: Resident, mesh: Mesh) -> Predictor:
        return Predictor(resident.whole(), resident.spec, mesh)

    def _finished(self, plan: str, started: float) -> Finished:
        held = self.residency.held()
        news, self._told = (None if held == self._told else held), held
        return Finished(plan=plan, milliseconds=(time.perf_counter() - started) * 1000, held=news)
