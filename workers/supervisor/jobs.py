"""The job that the ranks of a pool are busy with: handed out, brought together, answered."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Literal

import msgspec

from parallel_runtime.requests.requests import Step
from parallel_runtime.said import said

from ..pool_log import PoolLog
from ..wire.connection import Endpoint
from ..wire.error_info import of_all_ranks
from ..wire.frames import Frame
from ..wire.protocol import Abandon, Cancel, Done, Failed, Job, Ready, Run
from .job import ActiveJob
from .members import Members
from .stall import StallWatch

ALIKE_SECONDS = 5.0
"""So long after a rank failed in a run the others may fail alike: ranks compute in step, but a busy machine does not
run them so. Less costs a pool that could have lived; more is waited for in vain where one rank failed alone."""


class Jobs:
    """Hands one job after the other to the ranks, brings their answers together, and answers the client, who sends the
    next one then; a rank's failure while all run, which costs the pool, goes to `on_failure`."""

    def __init__(self, members: Members, client: Endpoint, log: PoolLog, on_failure: Callable[[Failed], None]):
        self.active: ActiveJob | None = None
        self.stall = StallWatch()
        self._members = members
        self._client = client
        self._log = log
        self._on_failure = on_failure
        self._open = True

    def close(self) -> None:
        """The pool ends: a job that comes now is for another one."""
        self._open = False

    async def begin(self, frame: Frame, job: Job) -> None:
        """Hand out a job of the client's."""
        assert self._members.complete
        assert self.active is None
        phase: Literal["preparing", "running"] = "running" if isinstance(job.request, Step) else "preparing"
        self.active = ActiveJob(job.number, self._members.size, phase, unread=not self._open)
        if self._open:
            self.stall.start(self._members.size, time.monotonic())
            await self._members.hand_out(frame)

    async def cancel(self, message: Cancel) -> None:
        """Tell the ranks to stop the active job."""
        if self.active is not None and self.active.number == message.number:
            self.active.cancelled = True
            await self._members.tell(message)

    async def answer(self, frame: Frame, message: Ready | Done | Failed) -> None:
        """Take in how a rank's part of the active job ended."""
        job = self.active
        if job is not None and job.number == message.number:
            job.answer(frame)
            self.stall.through(message.rank)
            await self._advance(job)

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

    async def _abandon(self, job: ActiveJob) -> None:
        await self._members.tell(Abandon(job.number))
        self._rest()
        failure = job.failure
        error = failure.error
        if not error.fix:
            error = msgspec.structs.replace(error, fix=said("The log is {log}.", log=self._log.path))
        await self._client.send(msgspec.structs.replace(failure, error=error, fits=tuple(sorted(job.ready))))

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

    def _rest(self) -> None:
        self.active = None
        self.stall.stop()
