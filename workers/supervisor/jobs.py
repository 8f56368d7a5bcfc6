"""The jobs of a pool: those that wait, and the one that the ranks are busy with."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable
from typing import Literal

import msgspec

from parallel_runtime.requests.requests import Step
from parallel_runtime.said import said

from ..pool_log import PoolLog
from ..wire.connection import Endpoint
from ..wire.error_info import CANCELLED, of_all_ranks
from ..wire.frames import Frame
from ..wire.protocol import Abandon, Cancel, Done, Failed, Job, Ready, Run
from .job import ActiveJob
from .members import Members
from .stall import StallWatch

ALIKE_SECONDS = 5.0
"""So long after a rank failed in a run the others may fail alike: ranks compute in step, but a busy machine does not
run them so. Less costs a pool that could have lived; more is waited for in vain where one rank failed alone."""

_HEARD_SECONDS = 0.001


class Jobs:
    """Hands one job after the other to the ranks, brings their answers together, and answers the client; a rank's
    failure while all run, which costs the pool, goes to `on_failure`."""

    def __init__(self, members: Members, client: Endpoint, log: PoolLog, on_failure: Callable[[Failed], None]):
        self.active: ActiveJob | None = None
        self.stall = StallWatch()
        self._members = members
        self._client = client
        self._log = log
        self._on_failure = on_failure
        self._waiting: deque[Frame] = deque()
        self._open = False

    @property
    def waiting(self) -> list[int]:
        """Numbers of those that no rank was given, in their order."""
        return [frame.message.number for frame in self._waiting if isinstance(frame.message, Job)]

    async def open(self) -> None:
        """Every rank is online: begin with what waits."""
        self._open = True
        await self._next()

    def close(self) -> None:
        """The pool ends: no other job begins."""
        self._open = False

    async def add(self, frame: Frame) -> None:
        """Take in a job of the client's. Not from where a rank is listened to, whose end this may wait for."""
        self._waiting.append(frame)
        # The end of a rank that came before the job is heard first, with all that it said before: the job is for
        # another pool then.
        while self._open and self._members.hung_up:
            await asyncio.sleep(_HEARD_SECONDS)
        await self._next()

    async def cancel(self, message: Cancel) -> None:
        """Tell the ranks to stop the active job, or forget one that waits."""
        if self.active is not None and self.active.number == message.number:
            self.active.cancelled = True
            await self._members.tell(message)
            return
        kept = deque(frame for frame in self._waiting if getattr(frame.message, "number", None) != message.number)
        if len(kept) < len(self._waiting):
            self._waiting = kept
            await self._client.send(Failed(message.number, 0, CANCELLED, cancelled=True))

    async def answer(self, frame: Frame, message: Ready | Done | Failed) -> None:
        """Take in how a rank's part of the active job ended."""
        job = self.active
        if job is not None and job.number == message.number:
            job.answer(frame)
            self.stall.through(message.rank)
            await self._advance(job)

    async def _next(self) -> None:
        if not self._open or self.active is not None or not self._waiting:
            return
        frame = self._waiting.popleft()
        assert isinstance(frame.message, Job)
        request = frame.message.request
        phase: Literal["preparing", "running"] = "running" if isinstance(request, Step) else "preparing"
        self.active = ActiveJob(frame.message.number, self._members.size, phase)
        self.stall.start(self._members.size, time.monotonic())
        await self._members.hand_out(frame)

    async def _advance(self, job: ActiveJob) -> None:
        if job.phase == "preparing" and job.prepared:
            if job.failed:
                await self._abandon(job)
            else:
                job.phase = "running"
                self.stall.start(self._members.size, time.monotonic())
                await self._members.tell(Run(job.number, job.agreed))
                if job.cancelled:
                    await self._members.tell(Cancel(job.number))
        elif job.unbegun:
            self._rest()
            await self._client.send(job.failure)
            await self._next()
        elif job.broken:
            self.blame(job)
            return
        elif job.failed_alike:
            await self._end_failed(job)
            return
        elif job.failing:
            seconds = min(ALIKE_SECONDS, self.stall.floor / 2)  # what failed is told, not that nothing went on
            asyncio.get_running_loop().call_later(seconds, self.blame, job)
            return
        if job.finished:
            self._rest()
            await self._client.forward(job.told)
            await self._next()

    async def _abandon(self, job: ActiveJob) -> None:
        await self._members.tell(Abandon(job.number))
        self._rest()
        failure = job.failure
        error = failure.error
        if not error.fix:
            error = msgspec.structs.replace(error, fix=said("The log is {log}.", log=self._log.path))
        await self._client.send(msgspec.structs.replace(failure, error=error, fits=tuple(sorted(job.ready))))
        await self._next()

    def blame(self, job: ActiveJob | None) -> None:
        """Tell of the ranks that have failed in a job's run, if it goes on: the others do not fail alike."""
        if job is not None and job is self.active and job.phase == "running":
            for failed in job.failed.values():
                if not failed.unbegun:
                    self._on_failure(failed)

    async def _end_failed(self, job: ActiveJob) -> None:
        """Every rank failed alike: the job ends, and the pool lives."""
        await self._members.tell(Abandon(job.number))  # those that had no part let go of calls as well
        self._rest()
        failure = job.failure
        error = of_all_ranks(failure.error, str(self._log.path))
        self._log.write(f"job {job.number} failed on every rank alike: {error.cause}")
        await self._client.send(msgspec.structs.replace(failure, error=error, launched=None))
        await self._next()

    def _rest(self) -> None:
        self.active = None
        self.stall.stop()
