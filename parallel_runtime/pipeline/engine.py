"""The engine of one rank: prepares and runs requests. Under the pool, or under plain torchrun from a script.

`prepare` makes no collective call but the creation of groups, which every rank reaches or none: everything that could
fail on all ranks alike has been checked before. What can fail on one rank alone (loading, allocating) comes after.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from ..config import ParallelConfig, ParallelPlan
from ..mesh import Mesh, build_mesh, single_rank_mesh
from ..plan import explain, resolve_plan
from .conditioning import Conditioning, ConditioningStore, check_arguments
from .control import Cancelled, Control
from .denoise import Denoising
from .predict import Call, Predictor
from .requests import Answer, ConditioningRef, Finished, Forward, Load, Loaded, Release, Request, Sample
from .resident import Residency, Resident

Results = dict[str, torch.Tensor]


@dataclass
class Prepared:
    """A request that this rank is ready to run. `run` is called on all ranks or on none."""

    work: Callable[[Mapping[str, torch.Tensor], Control], tuple[Answer, Results]]
    undo: Callable[[], Any] = lambda: None
    cancelled: bool = False

    def run(self, tensors: Mapping[str, torch.Tensor], control: Control) -> tuple[Answer, Results]:
        """Run; `tensors` are on this rank's device. Sets `cancelled` where the ranks agreed to stop."""
        try:
            return self.work(tensors, control)
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
        rank, world_size: place in the default process group; one rank needs none.
    """

    def __init__(self, device: torch.device, rank: int, world_size: int):
        self.device = device
        self.rank = rank
        self.world_size = world_size
        self.residency = Residency(device, rank)
        self.conditionings = ConditioningStore()
        self._meshes: dict[ParallelPlan, Mesh | None] = {}

    def prepare(self, request: Request, meta: Mapping[str, torch.Tensor], control: Control) -> Prepared:
        """Validate, plan, load.

        Args:
            meta: the request's tensors on the meta device.

        Raises:
            ParallelError: typed, with cause and fix; nothing has changed but, at most, that no model is resident.
            Cancelled: this rank heard of a cancel while it loaded.
        """
        if isinstance(request, Load):
            return self._prepare_load(request, control)
        if isinstance(request, Release):
            return self._prepare_release(request)
        resident = self.residency.get(request.model)
        if isinstance(request, Forward):
            return self._prepare_forward(request, resident, meta)
        return self._prepare_sample(request, resident, meta)

    def _prepare_load(self, request: Load, control: Control) -> Prepared:
        config = ParallelConfig.from_mapping(request.config)
        resident, reused = self.residency.load(request, config, control)
        heads = resident.spec.heads(resident.model_config)
        try:
            plan = resolve_plan(config, request.ranks, heads, batch=1)
        except Exception:
            self._forget()
            raise
        answer = Loaded(
            resident.spec.name,
            resident.parameters,
            resident.parameter_bytes,
            reused,
            explain(plan, config, request.ranks, heads, batch=1),
        )
        return Prepared(lambda tensors, control: (answer, {}), undo=self._forget)

    def _prepare_release(self, request: Release) -> Prepared:
        def work(tensors: Mapping[str, torch.Tensor], control: Control) -> tuple[Answer, Results]:
            current = self.residency.current
            freed = self._forget() if current is not None and current.key == request.model else 0
            return Finished(bytes_freed=freed), {}

        return Prepared(work)

    def free(self) -> None:
        """After an allocation failed: give back what this rank holds, so that the next request finds memory."""
        self._forget()

    def _forget(self) -> int:
        self.conditionings.clear()
        return self.residency.release()

    def _prepare_forward(self, request: Forward, resident: Resident, meta: Mapping[str, torch.Tensor]) -> Prepared:
        batch = meta["x"].shape[0]
        self._check(request.conditioning, resident, meta["x"], meta)
        mesh, plan = self._mesh(resident, batch)

        def work(tensors: Mapping[str, torch.Tensor], control: Control) -> tuple[Answer, Results]:
            started = time.perf_counter()
            self.conditionings.drop(request.dropped)
            conditioning = self.conditionings.take(request.conditioning, tensors)
            results: Results = {}
            if mesh is not None:
                call = Call(tensors["x"], tensors["timestep"], conditioning)
                results["output"] = self._predictor(resident, mesh)([call])[0]
            return _finished(plan, started), results

        return Prepared(work)

    def _prepare_sample(self, request: Sample, resident: Resident, meta: Mapping[str, torch.Tensor]) -> Prepared:
        x = meta["x"]
        for branch in request.branches:
            self._check(branch, resident, x, meta)
        denoising = Denoising(request, resident.dtype)
        mesh, plan = self._mesh(resident, x.shape[0] * len(request.branches))

        def work(tensors: Mapping[str, torch.Tensor], control: Control) -> tuple[Answer, Results]:
            started = time.perf_counter()
            self.conditionings.drop(request.dropped)
            branches = [self.conditionings.take(branch, tensors) for branch in request.branches]
            if mesh is None:
                denoising.sit_out(tensors["sigmas"], control)
                return _finished(plan, started), {}
            latent = denoising.run(self._predictor(resident, mesh), branches, tensors, control)
            return _finished(plan, started), {"latent": latent}

        return Prepared(work)

    def _check(
        self, reference: ConditioningRef, resident: Resident, x: torch.Tensor, meta: Mapping[str, torch.Tensor]
    ) -> None:
        conditioning = self.conditionings.peek(reference, meta)
        check_arguments(conditioning, resident.spec, x.shape[0])
        shapes = Conditioning({name: _to_meta(value) for name, value in conditioning.arguments.items()})
        timestep = torch.empty(x.shape[0], device="meta")
        arguments = resident.spec.adapter.to_transformer(
            x, timestep, shapes.context, resident.model_config, **shapes.extras
        )
        resident.spec.check_widths(arguments, resident.model_config)

    def _mesh(self, resident: Resident, batch: int) -> tuple[Mesh | None, ParallelPlan]:
        """The mesh for a batch of that size. Pure planning, so that all ranks create the same groups in one order."""
        heads = resident.spec.heads(resident.model_config)
        plan = resolve_plan(resident.config, resident.ranks, heads, batch)
        if plan not in self._meshes:
            self._meshes[plan] = (
                single_rank_mesh()
                if self.world_size == 1
                else build_mesh(plan, self.device.type, self.rank, self.world_size)
            )
        return self._meshes[plan], plan

    def _predictor(self, resident: Resident, mesh: Mesh) -> Predictor:
        assert resident.transformer is not None
        return Predictor(resident.transformer, resident.spec, mesh)


def _to_meta(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.to("meta")
    return [_to_meta(item) for item in value] if isinstance(value, list) else value


def _finished(plan: ParallelPlan, started: float) -> Finished:
    return Finished(plan=str(plan), milliseconds=(time.perf_counter() - started) * 1000)
