"""Ranks that a running pool takes in: they start beside it while it works, and join between two jobs.

A `Grow` job waits here until every newcomer is there with its device. Then it goes the way of all jobs, to newcomers
as well: all ranks leave their world and meet in a larger one. Until then a newcomer's failure costs the job alone; from
then on the newcomers are the pool's ranks, and fail as such.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Coroutine
from dataclasses import replace
from pathlib import Path
from typing import Any

from parallel_runtime.requests.requests import Grow
from parallel_runtime.said import Said, said

from ..launch import PoolSpec, rank_environment
from ..pool_log import PoolLog
from ..processes import end_descendants
from ..wire.endpoint import Endpoint
from ..wire.error_info import CANCELLED, ErrorInfo
from ..wire.frames import Frame
from ..wire.protocol import Cancel, Failed, Job
from .jobs import Jobs
from .members import Members
from .torchrun import Torchrun
from .verdict import BLAME_SECONDS, Blame, Verdict


class Growth:
    """At most one at a time.

    Args:
        spec: of the pool as it is.
        start_seconds: that newcomers may take.
        torchruns: of the pool; that of newcomers is added when they are taken in.
        watch: runs a coroutine, whose failure is the pool's.
        on_loss: called with a sign that the pool has lost a part.
    """

    def __init__(
        self,
        *,
        spec: PoolSpec,
        directory: Path,
        rank_module: str,
        log: PoolLog,
        members: Members,
        jobs: Jobs,
        client: Endpoint,
        torchruns: list[Torchrun],
        watch: Callable[[Coroutine[Any, Any, None]], Any],
        on_loss: Callable[[Blame, Said], None],
    ):
        self.start_seconds = 0.0
        self._spec = spec
        self._directory = directory
        self._rank_module = rank_module
        self._log = log
        self._members = members
        self._jobs = jobs
        self._client = client
        self._torchruns = torchruns
        self._watch = watch
        self._on_loss = on_loss
        self._wanted: PoolSpec | None = None  # with the newcomers, from their start until they are taken in
        self._verdict = Verdict()
        self._failing = False
        self._job: Frame | None = None  # waits for them
        self._changing = asyncio.Lock()

    def ask(self, frame: Frame) -> None:
        """Take in a `Grow` job. Newcomers that an earlier one started, and did not wait for, are taken as they are."""
        self._job = frame
        self._watch(self._begin(frame))

    async def _begin(self, frame: Frame) -> None:
        assert isinstance(frame.message, Job)
        assert isinstance(frame.message.request, Grow)
        async with self._changing:
            self._settle()
            wanted = replace(self._spec, devices=frame.message.request.devices)
            if self._job is not frame:
                return  # cancelled
            if not self._spec.grows_to(wanted):
                why = said("A pool on {spec} cannot become {wanted} while it runs.", spec=self._spec, wanted=wanted)
                await self._fail(ErrorInfo("RequestError", why, said("Restart ComfyUI.")))
                return
            if self._wanted not in (None, wanted):
                await self._end_newcomers()
            if self._wanted is None:
                try:
                    await self._start(wanted)
                except OSError as error:
                    why = said("More ranks could not be started: {strerror}.", strerror=error.strerror or error)
                    await self._fail(ErrorInfo("PoolError", why, said("Close other programs, or raise this limit.")))
                    return
        await self.look()

    async def cancel(self, message: Cancel) -> bool:
        """Let a job that waits for newcomers go; return whether it was one. They go on starting, for the next."""
        if self._job is None or getattr(self._job.message, "number", None) != message.number:
            return False
        self._job = None
        await self._client.send(Failed(message.number, 0, CANCELLED, cancelled=True))
        return True

    async def look(self) -> None:
        """A newcomer may have come: when all are there, a job that waits for them joins the others."""
        if self._job is None or self._wanted is None or self._failing:
            return
        if not self._members.absent(range(self._wanted.world_size)):
            job, self._job = self._job, None
            await self._jobs.add(job)

    def lost(self, blame: Blame, what: Said) -> None:
        """A sign that a newcomer, or their torchrun, is gone."""
        if self._wanted is None:
            return  # it was ended
        error = ErrorInfo(
            "PoolError",
            said("{what} before it could join the running pool.", what=what),
            said(
                "Free what it needs, or leave its device out of Parallel Config. The log is {log}.", log=self._log.path
            ),
            traceback=self._log.tail(),
        )
        if self._verdict.note(blame, error):
            self._failing = True
            self._job = self._job or self._jobs.withdraw(Grow)  # it may wait behind another already
            self._watch(self._judge())

    def _settle(self) -> None:
        """Newcomers that were taken in are part of the pool."""
        if self._wanted is not None and self._members.size == self._wanted.world_size:
            self._spec, self._wanted = self._wanted, None

    async def _start(self, wanted: PoolSpec) -> None:
        first = self._members.size
        environment = rank_environment(wanted, self._directory, os.environ, first=first)
        torchrun = await Torchrun.start(wanted, self._directory, self._rank_module, environment, self._log, first)
        self._torchruns.append(torchrun)
        self._wanted, self._verdict, self._failing = wanted, Verdict(), False
        self._members.expect(wanted)
        self._watch(torchrun.hear())
        self._watch(self._watch_torchrun(torchrun, first))
        self._watch(self._watch_start(wanted))

    async def _watch_torchrun(self, torchrun: Torchrun, first: int) -> None:
        blame, what = await torchrun.end()
        if self._members.size > first:
            self._on_loss(blame, what)
        elif torchrun in self._torchruns:
            self.lost(blame, what)

    async def _watch_start(self, wanted: PoolSpec) -> None:
        await asyncio.sleep(self.start_seconds)
        absent = self._members.absent(range(wanted.world_size))
        if absent and self._wanted is wanted:
            self.lost(
                Blame.RANK_FAILED,
                said(
                    "{what} within {seconds} seconds",
                    what=said("Ranks {ranks} did not start", ranks=absent),
                    seconds=f"{self.start_seconds:g}",
                ),
            )

    async def _judge(self) -> None:
        """What failed first makes the rest fail: wait a moment, then name the likeliest cause."""
        await asyncio.sleep(BLAME_SECONDS)
        async with self._changing:
            error = self._verdict.cause
            self._log.write(f"newcomers end: {error.cause}\n{error.traceback}")
            await self._end_newcomers()
            await self._fail(error)

    async def _fail(self, error: ErrorInfo) -> None:
        job, self._job = self._job, None
        if job is not None:
            assert isinstance(job.message, Job)
            await self._client.send(Failed(job.message.number, 0, error))

    async def _end_newcomers(self) -> None:
        """End their processes, and nothing else below this one."""
        torchrun = self._torchruns.pop()
        self._wanted = None
        await end_descendants(0.0, but=[each.pid for each in self._torchruns])
        await torchrun.wait()
        self._members.expect(self._spec)
