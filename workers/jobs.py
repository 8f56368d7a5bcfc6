"""The jobs of a pool: those that wait, and the one that the ranks are busy with."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable

import msgspec

from parallel_runtime.pipeline.requests import Step

from .frames import Frame
from .job import ActiveJob
from .members import Members
from .peer import Peer
from .pool_log import PoolLog
from .protocol import Abandon, Cancel, Compiling, Done, ErrorInfo, Failed, Job, Loading, Progress, Ready, Run
from .stall import StallWatch


class Jobs:
    """Hands one job after the other to the ranks, brings their answers together, and answers the client.

    Args:
        on_failure: called with what a rank reports when it fails while all ranks run, which costs the pool.
    """

    def __init__(
        self, members: Members, client: Peer, world_size: int, log: PoolLog, on_failure: Callable[[Failed], None]
    ):
        self.active: ActiveJob | None = None
        self.stall = StallWatch()
        self._members = members
        self._client = client
        self._world_size = world_size
        self._log = log
        self._on_failure = on_failure
        self._waiting: deque[Frame] = deque()
        self._open = False

    @property
    def numbers(self) -> list[int]:
        """Of the active job and of those that wait, in their order."""
        waiting = [frame.message.number for frame in self._waiting if isinstance(frame.message, Job)]
        return [self.active.number, *waiting] if self.active else waiting

    async def open(self) -> None:
        """Every rank is online: begin with what waits."""
        self._open = True
        await self._next()

    def close(self) -> None:
        """The pool ends: no other job begins."""
        self._open = False

    async def add(self, frame: Frame) -> None:
        """Take in a job of the client's."""
        self._waiting.append(frame)
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
            await self._client.send(Failed(message.number, 0, ErrorInfo("PoolError", "Cancelled.", ""), cancelled=True))

    async def answer(self, frame: Frame) -> None:
        """Take in what a rank says about the active job."""
        if isinstance(frame.message, Progress):
            await self._client.forward(frame)
        elif isinstance(frame.message, Compiling):
            self.stall.waited(time.monotonic())
            await self._client.forward(frame)
        elif isinstance(frame.message, Loading):
            await self._client.forward(frame)
        elif self.active is not None and isinstance(frame.message, (Ready, Done, Failed)):
            self.active.answer(frame)
            self.stall.through(frame.message.rank)
            await self._advance(self.active)

    async def _next(self) -> None:
        if not self._open or self.active is not None or not self._waiting:
            return
        frame = self._waiting.popleft()
        assert isinstance(frame.message, Job)
        request = frame.message.request
        self.active = ActiveJob(
            frame.message.number,
            self._world_size,
            "running" if isinstance(request, Step) else "preparing",
            prompt=isinstance(request, Step),
        )
        self.stall.start(self._world_size, time.monotonic())
        await self._members.hand_out(frame)

    async def _advance(self, job: ActiveJob) -> None:
        if job.phase == "preparing" and job.prepared:
            if job.failed:
                await self._abandon(job)
            else:
                job.phase = "running"
                self.stall.start(self._world_size, time.monotonic())
                await self._members.tell(Run(job.number, job.agreed))
                if job.cancelled:
                    await self._members.tell(Cancel(job.number))
        elif job.phase == "running" and job.failed:
            for failed in job.failed.values():
                self._on_failure(failed)
            return
        if job.finished:
            self._rest()
        if job.answerable:
            assert job.result is not None
            job.answered = True
            await self._client.forward(job.result)
        if job.finished:
            await self._next()

    async def _abandon(self, job: ActiveJob) -> None:
        await self._members.tell(Abandon(job.number))
        self._rest()
        failure = job.failure
        error = failure.error
        if not error.fix:
            error = msgspec.structs.replace(error, fix=f"The log is {self._log.path}.")
        await self._client.send(msgspec.structs.replace(failure, error=error, fits=tuple(sorted(job.ready))))
        await self._next()

    def _rest(self) -> None:
        self.active = None
        self.stall.stop()
