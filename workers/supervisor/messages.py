"""Who answers which message: a table for what the client says, and one for what the ranks say."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
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

Handler = Callable[[Frame, Any], Awaitable[None]]
"""Gets the frame as it came, and the message in it."""


class Messages:
    """What comes to the supervisor.

    Args:
        status: the pool's.
        shut_down: the client wants its end.
    """

    def __init__(
        self,
        client: Endpoint,
        members: Members,
        jobs: Jobs,
        status: Callable[[], Status],
        shut_down: Callable[[], None],
    ):
        async def end(_: Frame, shutdown: Shutdown) -> None:
            shut_down()

        async def arrive(_: Frame, online: Online) -> None:
            members.arrive(online)
            await client.send(status())  # it counts who has come, and then that all have
            if members.complete:
                await jobs.open()

        async def beat(_: Frame, beat: Heartbeat) -> None:
            jobs.stall.beat(beat.rank, beat.progress, time.monotonic(), beat.waits)

        async def pass_on(frame: Frame, _: object) -> None:
            await client.forward(frame)

        async def compile(frame: Frame, _: Compiling) -> None:
            jobs.stall.waited(time.monotonic())  # the others may be waiting for it in a collective
            await client.forward(frame)

        async def lose(_: Frame, lost: Lost) -> None:
            members.lose(lost.rank)

        self.of_client: dict[type, Handler] = {
            Job: lambda frame, _: jobs.add(frame),
            Cancel: lambda _, cancel: jobs.cancel(cancel),
            AskStatus: lambda *_: client.send(status()),
            Shutdown: end,
        }
        self.of_rank: dict[type, Handler] = {
            Online: arrive,
            Heartbeat: beat,
            Loading: pass_on,
            Measuring: pass_on,
            Compiling: compile,
            Progress: pass_on,
            Ready: jobs.answer,
            Done: jobs.answer,
            Failed: jobs.answer,
            Lost: lose,
        }
        self._stall = jobs.stall

    async def from_client(self, frame: Frame) -> None:
        """The client said something."""
        if (handle := self.of_client.get(type(frame.message))) is not None:
            await handle(frame, frame.message)

    async def from_rank(self, rank: int, frame: Frame) -> None:
        """A rank said something. But for a heartbeat, that is a sign that it gets on."""
        if not isinstance(frame.message, Heartbeat):
            self._stall.answered(rank, time.monotonic())
        if (handle := self.of_rank.get(type(frame.message))) is not None:
            await handle(frame, frame.message)
