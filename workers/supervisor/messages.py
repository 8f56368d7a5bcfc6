"""Who answers which message: a table for what the client says, and one for what the ranks say."""

from __future__ import annotations

import time
from collections.abc import Callable, Coroutine
from typing import Any

from ..wire.endpoint import Endpoint
from ..wire.frames import Frame
from ..wire.protocol import (
    AskStatus,
    Cancel,
    Compiling,
    Done,
    Failed,
    Heartbeat,
    Job,
    Loading,
    Lost,
    Measuring,
    Online,
    Progress,
    Ready,
    Shutdown,
    Status,
)
from .jobs import Jobs
from .members import Members

Handler = Callable[[Frame, Any], Coroutine[Any, Any, None]]
"""Gets the frame as it came, and the message in it."""


class Messages:
    """What comes to the supervisor.

    Args:
        status: the pool's.
        shut_down: called when the client says so.
    """

    def __init__(
        self,
        client: Endpoint,
        members: Members,
        jobs: Jobs,
        status: Callable[[], Status],
        shut_down: Callable[[], None],
    ):
        self._client = client
        self._members = members
        self._jobs = jobs
        self._status = status
        self._shut_down = shut_down
        self._of_client: dict[type, Handler] = {
            Job: self._add_job,
            Cancel: self._cancel_job,
            AskStatus: self._tell_status,
            Shutdown: self._end,
        }
        self._of_rank: dict[type, Handler] = {
            Online: self._arrive,
            Heartbeat: self._beat,
            Loading: self._pass_on,
            Measuring: self._pass_on,
            Compiling: self._compile,
            Progress: self._pass_on,
            Ready: self._answer,
            Done: self._answer,
            Failed: self._answer,
            Lost: self._lose,
        }

    async def from_client(self, frame: Frame) -> None:
        """The client said something."""
        if (handle := self._of_client.get(type(frame.message))) is not None:
            await handle(frame, frame.message)

    async def from_rank(self, rank: int, frame: Frame) -> None:
        """A rank said something. But for a heartbeat, that is a sign that it gets on."""
        if not isinstance(frame.message, Heartbeat):
            self._jobs.stall.answered(rank, time.monotonic())
        if (handle := self._of_rank.get(type(frame.message))) is not None:
            await handle(frame, frame.message)

    async def _add_job(self, frame: Frame, _: Job) -> None:
        await self._jobs.add(frame)

    async def _cancel_job(self, _: Frame, cancel: Cancel) -> None:
        await self._jobs.cancel(cancel)

    async def _tell_status(self, _: Frame, ask: AskStatus) -> None:
        await self._client.send(self._status())

    async def _end(self, _: Frame, shutdown: Shutdown) -> None:
        self._shut_down()

    async def _arrive(self, _: Frame, online: Online) -> None:
        self._members.arrive(online)
        await self._client.send(self._status())  # it counts who has come, and then that all have
        if self._members.complete:
            await self._jobs.open()

    async def _beat(self, _: Frame, beat: Heartbeat) -> None:
        self._jobs.stall.beat(beat.rank, beat.progress, time.monotonic(), beat.waits)

    async def _pass_on(self, frame: Frame, _: object) -> None:
        await self._client.forward(frame)

    async def _compile(self, frame: Frame, _: Compiling) -> None:
        self._jobs.stall.waited(time.monotonic())  # the others may be waiting for it in a collective
        await self._client.forward(frame)

    async def _answer(self, frame: Frame, answer: Ready | Done | Failed) -> None:
        await self._jobs.answer(frame, answer)

    async def _lose(self, _: Frame, lost: Lost) -> None:
        self._members.lose(lost.rank)
