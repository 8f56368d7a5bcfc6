"""The engine of one rank: prepares and runs requests. Under the pool, or under plain torchrun from a script.

`prepare` makes no collective call, so a rank that fails there leaves nobody waiting: it knows a rank's place in a plan,
and the groups of the plan are joined when all ranks run. Each kind of request has a file of its own (prepared_*.py).
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from ..errors import NotLoadedError
from ..requests.control import Control
from ..requests.requests import Attach, Forward, Invoke, KeepPatches, Load, Release, Request, RunVae, Step, Survey
from ..said import said
from .prepared import Prepared
from .prepared_forward import PreparedForward, PreparedInvoke
from .prepared_kept import PreparedAttach, PreparedPatches
from .prepared_load import PreparedLoad, PreparedRelease, PreparedSurvey
from .prepared_sample import PreparedSample
from .prepared_vae import PreparedVae
from .rank_state import RankState


class Engine(RankState):
    """One rank's engine; what it has from request to request is its state."""

    def prepare(self, request: Request, meta: Mapping[str, torch.Tensor], control: Control) -> Prepared:
        """Validate, plan, load.

        Args:
            meta: the request's tensors on the meta device.

        Raises:
            ParallelError: typed, with cause and fix; nothing has changed but which models are on the device.
            Cancelled: this rank heard of a cancel while it loaded.
        """
        if isinstance(request, Load):
            return PreparedLoad.prepare(self, request, control)
        if isinstance(request, Survey):
            return PreparedSurvey.prepare(self, request)
        if isinstance(request, Release):
            return PreparedRelease.prepare(self, request)
        if isinstance(request, Step):
            return self.recall(request)
        if isinstance(request, KeepPatches):
            return PreparedPatches.prepare(self, request)
        if isinstance(request, Attach):
            return PreparedAttach(state=self, request=request)
        self.tell_all_held()  # the answer to a request that was prepared tells all
        if isinstance(request, RunVae):
            return PreparedVae.prepare(self, request, meta, control)
        resident = self.residency.get(request.model)
        resident.activate(control.loading, self.patches.find(request.patches))
        if isinstance(request, Invoke):
            return PreparedInvoke.prepare(self, request, resident, meta)
        if isinstance(request, Forward):
            return PreparedForward.prepare(self, request, resident, meta)
        return PreparedSample.prepare(self, request, resident, meta)

    def recall(self, step: Step) -> Prepared:
        """A call that an earlier `Forward` prepared.

        Raises:
            NotLoadedError: none of that number is kept, on any rank: see `forget_calls`.
        """
        if step.kind not in self.calls:
            raise NotLoadedError(
                said("The workers keep no call of number {kind}.", kind=step.kind), "Queue the prompt again."
            )
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
