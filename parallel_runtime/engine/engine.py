"""The engine of one rank: prepares and runs requests. Under the pool, or under plain torchrun from a script.

`prepare` makes no collective call, so a rank that fails there leaves nobody waiting: it knows a rank's place in a plan,
and the groups of the plan are joined when all ranks run. Requests alike have a file in common (prepared_*.py).
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from ..errors import NotLoadedError
from ..requests.control import Control
from ..requests.requests import Attach, Forward, Invoke, KeepPatches, Load, Release, Request, RunVae, Step, Survey
from .prepared_load import prepare_attach, prepare_load, prepare_patches, prepare_release, prepare_survey
from .prepared_run import prepare_forward, prepare_invoke, prepare_sample
from .prepared_vae import prepare_vae
from .rank_state import Prepared, RankState


class Engine(RankState):
    """One rank's engine; what it has from request to request is its state."""

    def prepare(self, request: Request, meta: Mapping[str, torch.Tensor], control: Control) -> Prepared:
        """Validate, plan, load; `meta` are the tensors on the meta device. ParallelError, typed, with cause and fix:
        nothing has changed but which models are on the device; Cancelled: this rank heard of one while it loaded."""
        if isinstance(request, Load):
            return prepare_load(self, request, control)
        if isinstance(request, Survey):
            return prepare_survey(self, request)
        if isinstance(request, Release):
            return prepare_release(self, request)
        if isinstance(request, Step):
            return self.recall(request)
        if isinstance(request, KeepPatches):
            return prepare_patches(self, request)
        if isinstance(request, Attach):
            return prepare_attach(self, request)
        if isinstance(request, RunVae):
            return prepare_vae(self, request, meta, control)
        resident = self.residency.get(request.model)
        resident.activate(control.loading, self.patches.find(request.patches))
        if isinstance(request, Invoke):
            return prepare_invoke(self, request, resident, meta)
        if isinstance(request, Forward):
            return prepare_forward(self, request, resident, meta)
        return prepare_sample(self, request, resident, meta)

    def recall(self, step: Step) -> Prepared:
        """A call that an earlier `Forward` prepared; NotLoadedError, on every rank, where that number is not kept."""
        if step.kind not in self.calls:
            what = "The workers keep no call of number {kind}."
            raise NotLoadedError(what, "Queue the prompt again.", kind=step.kind)
        return self.calls[step.kind]

    def forget_calls(self) -> None:
        """Let go of what `recall` finds. Every rank does so when a request was refused in PREPARE: the rank that
        refused it may have lost its own (`free`), and all have to keep the same."""
        self.calls.clear()

    def forget_failed_run(self) -> None:
        """Let go of what a run may have left that failed somewhere in it: calls, conditionings, recordings, what is
        being compiled. Weights stay. Every rank that failed does so, and nothing that it keeps is agreed on then."""
        self.forget_requests()
        self.residency.forget_runs()

    def free(self) -> None:
        """After an allocation failed on this rank: give back what it holds, so that the next request finds memory."""
        self.forget_requests()
        self.residency.store.free()
