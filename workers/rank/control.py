"""What the engine tells the supervisor of a job, and hears from it: a rank's side of progress and cancel."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Protocol

import torch
import torch.distributed as dist

from parallel_runtime.denoising.progress import StepTelling
from parallel_runtime.requests.control import Cancelled, Control

from ..wire.connection import Channel
from ..wire.protocol import Doing, Job, Progress
from ..wire.tensors import pack
from .heartbeat import Heartbeat
from .inbox import Inbox

LOADING_SECONDS = 0.25
"""Between two messages of how far a load is."""


class Reporter(Protocol):
    """What of a rank a job reports by, and is told of a cancel by."""

    rank: int
    device: torch.device
    connection: Channel
    heartbeat: Heartbeat
    inbox: Inbox


class RankControl(Control):
    """Progress and cancel of the job at hand, for the engine."""

    def __init__(self, rank: Reporter, job: Job):
        self._rank = rank
        self._number = job.number
        self._steps = StepTelling(self._report, rank.device)
        self._reported_loading = 0.0

    def progress(self, step: int, total: int, denoised: torch.Tensor | None = None) -> None:
        self._rank.heartbeat.got_on()
        if self._rank.rank == 0:
            # The others wait for nothing here: the vote keeps them with rank 0.
            self._steps.step(step, total, denoised)

    def finish(self) -> None:
        """The job went well: tell of its last step, before its end is told of."""
        self._steps.flush()

    def _report(self, step: int, total: int, denoised: torch.Tensor | None) -> None:
        specs, buffers = pack({} if denoised is None else {"denoised": denoised})
        self._rank.connection.send(Progress(self._number, step, total, specs), buffers)

    def before_compiling(self) -> None:
        self._rank.heartbeat.watch_compiler()

    def check_cancel(self) -> None:
        self._rank.heartbeat.got_on()
        if self._rank.inbox.cancelled == self._number:
            raise Cancelled

    def loading(self, done: int, total: int) -> None:
        self.check_cancel()
        now = time.monotonic()
        if self._rank.rank == 0 and now - self._reported_loading >= LOADING_SECONDS:
            self._reported_loading = now
            self._rank.connection.send(Doing(self._number, "weights", done, total))

    def measuring(self) -> None:
        if self._rank.rank == 0:
            self._rank.connection.send(Doing(self._number, "measuring"))

    def vote_stop(self, members: dist.ProcessGroup | None) -> Callable[[], bool]:
        stop = self._rank.inbox.cancelled == self._number
        if members is None:
            return lambda: stop
        # Rank 0 alone decides, and its decision travels with the step: a cancel that ranks saw between different
        # steps would leave some of them inside a collective for ever.
        decision = torch.tensor([stop and self._rank.rank == 0], dtype=torch.uint8)
        work = dist.broadcast(decision, src=0, group=members, async_op=True)

        def result() -> bool:
            assert work is not None
            work.wait()
            return bool(decision.item())

        return result
