"""The supervisor: a small process between ComfyUI and the ranks, without torch. It starts the ranks, has jobs.py hand
out what comes, and ends the whole pool as soon as the client is gone or any part of it fails."""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
import socket
import time
import traceback
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import msgspec

from parallel_runtime.errors import ParallelError
from parallel_runtime.said import Said, said, together

from ..launch import PoolSpec, open_meeting, rank_commands, rank_environment, read_seconds
from ..leftovers import end_tree
from ..state_folder import PoolLog, prune_compiled, state_directory, tell_of_fresh_pool
from ..wire import protocol
from ..wire.connection import Endpoint, listen_in
from ..wire.frames import Frame
from ..wire.protocol import ErrorInfo, Failed, Heartbeat, PoolState, Shutdown, Status, describe
from .jobs import FLOOR_SECONDS, TICK_SECONDS, Jobs
from .members import Blame, Members

START_SECONDS = 300.0
BLAME_SECONDS = 0.3  # so long after the first sign of a failure the others are waited for
EXIT_GRACE_SECONDS = 2.0
DUMP_SECONDS = 0.7
REPORT_SECONDS = 5.0


class Supervisor:
    """The pool as one object: its start, its state, and its end."""

    def __init__(self, client: socket.socket, parent: int, spec: PoolSpec, folder: Path, log: PoolLog, module: str):
        self.client = Endpoint(client)
        self.spec = spec
        self.folder = folder
        self.log = log
        self.rank_module = module
        self.members = Members(spec, log, self._from_rank, self._lost, self._watch)
        self.jobs = Jobs(self.members, self.client, log, self._rank_failed)
        self.error: ErrorInfo | None = None
        self.ended = asyncio.Event()
        self._parent = parent
        self._signs: list[tuple[Blame, ErrorInfo]] = []  # of a failure, in the order in which they were noticed
        self._tasks: set[asyncio.Task[None]] = set()

    async def run(self) -> None:
        """Live until the client leaves or the pool fails; then take everything down."""
        self._watch(self._serve_client())
        self._watch(self._watch_client())
        start = self._watch(self._start())
        self._watch(asyncio.to_thread(prune_compiled, state_directory() / "compiled"))
        await self.ended.wait()
        await asyncio.wait([start])
        grace = EXIT_GRACE_SECONDS if self.error is None else 0.0
        await asyncio.to_thread(end_tree, os.getpid(), grace, math.inf, itself=False)
        await self.members.wait()
        for task in self._tasks:
            task.cancel()
        if self.error is not None:
            with contextlib.suppress(asyncio.TimeoutError):  # a client that is stopped reads nothing
                await asyncio.wait_for(self._report_death(self.error), REPORT_SECONDS)

    async def _start(self) -> None:
        """Listen, and start the ranks. What fails here is the pool's death, with its cause."""
        start_seconds = read_seconds(os.environ, "PARALLEL_DIT_START_SECONDS", START_SECONDS)
        self.jobs.stall.floor = read_seconds(os.environ, "PARALLEL_DIT_STALL_SECONDS", FLOOR_SECONDS)
        self._watch(self.members.open(listen_in(self.folder)))
        interface, where = ("lo", "") if self.spec.hosts == 1 else open_meeting(os.environ)
        environment = rank_environment(self.spec, self.folder, os.environ, interface)
        for command, own in rank_commands(self.spec, self.rank_module, where):
            await self.members.start(command, environment | own)
        self._watch(self._watch_start(start_seconds))
        self._watch(self._watch_stall())

    def _watch(self, coroutine) -> asyncio.Task[None]:
        task = asyncio.ensure_future(self._guard(coroutine))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def _guard(self, coroutine) -> None:
        try:
            await coroutine
        except ParallelError as error:
            self._die(describe(error, None))
        except Exception as error:  # noqa: BLE001 - process border: a fault of ours must end the pool, not hang it
            self.log.write(f"supervisor: {traceback.format_exc()}")
            self._die(msgspec.structs.replace(describe(error, None), fix=self._fresh()))

    @property
    def state(self) -> PoolState:
        """What the pool is doing."""
        if self.error is not None:
            return "dead"
        if not self.members.complete:
            return "starting"
        return self.jobs.active.phase if self.jobs.active else "idle"

    def status(self) -> Status:
        """The pool as the client may ask for it at any time."""
        return Status(self.state, dict(self.members.pids), dict(self.members.devices), self.error)

    async def arrive(self, online: protocol.Online) -> None:
        """A rank has its device."""
        self.members.arrive(online)
        await self.client.send(self.status())  # it counts who has come, and then that all have

    async def tell(self, frame: Frame, message: protocol.Doing | protocol.Progress) -> None:
        """How far a job is. Where a rank compiles, the others may be waiting for it in a collective."""
        if isinstance(message, protocol.Doing) and message.what == "compile":
            self.jobs.stall.waited(time.monotonic())
        await self.client.forward(frame)

    async def _serve_client(self) -> None:
        while not self.ended.is_set() and (frame := await self.client.receive()) is not None:
            if isinstance(frame.message, Shutdown):
                break
            if (handle := OF_CLIENT.get(type(frame.message))) is not None:
                await handle(self, frame, frame.message)
        self.ended.set()

    async def _from_rank(self, rank: int, frame: Frame) -> None:
        """But for a heartbeat, what a rank says is a sign that it gets on. What comes after the end is not heard."""
        if self.ended.is_set():
            return
        if isinstance(beat := frame.message, Heartbeat):
            self.jobs.stall.beat(beat.rank, beat.progress, time.monotonic(), beat.waits)
            return
        self.jobs.stall.answered(rank, time.monotonic())
        if (handle := OF_RANK.get(type(frame.message))) is not None:
            await handle(self, frame, frame.message)

    async def _watch_client(self) -> None:
        """End with the client, also where another process holds a copy of its end of the socket: one it forked."""
        while os.getppid() == self._parent:
            await asyncio.sleep(TICK_SECONDS)
        self.ended.set()

    async def _watch_start(self, seconds: float) -> None:
        await asyncio.sleep(seconds)
        if self.state == "starting":
            what = said("{what} within {seconds} seconds", what=self.members.missing, seconds=f"{seconds:g}")
            self._die(self._loss(what))

    async def _watch_stall(self) -> None:
        while True:
            await asyncio.sleep(TICK_SECONDS)
            if self.client.sending.locked():  # it is stopped or busy, and a rank's messages wait for it
                self.jobs.stall.waited(time.monotonic())
            stall = self.jobs.stall.tick(time.monotonic())
            if stall is not None:
                self.members.dump_stacks()
                await asyncio.sleep(DUMP_SECONDS)
                self._die(self._loss(self.members.stalled(*stall), with_stacks=True))

    def _loss(self, what: Said, with_stacks: bool = False) -> ErrorInfo:
        template = "{what} in the middle of a job."
        if self.state == "starting":
            template = "{what} while the workers started."
        elif self.jobs.active is None or self.jobs.active.unread:
            template = "{what} while the workers were idle."
        return ErrorInfo("PoolError", said(template, what=what), self._fresh(with_stacks), traceback=self.log.tail())

    def _fresh(self, with_stacks: bool = False) -> Said:
        return tell_of_fresh_pool(self.log.path, with_stacks)

    def _rank_failed(self, failed: Failed) -> None:
        blame = Blame.COLLECTIVE_BROKE if failed.error.consequence else Blame.RANK_FAILED
        fix = together((failed.error.fix, self._fresh()))
        self._suspect(blame, msgspec.structs.replace(failed.error, fix=fix))

    def _lost(self, blame: Blame, what: Said, unread_by: int | None) -> None:
        # Where a rank has failed by itself, or ended, another that ends from now on does so in consequence.
        first = not any(sign in (Blame.HOST_LOST, Blame.RANK_FAILED, Blame.RANK_ENDED) for sign, _ in self._signs)
        if unread_by is not None and self.jobs.active is not None and first:
            self.jobs.active.note_unread(unread_by)
        self._suspect(blame, self._loss(what))

    def _suspect(self, blame: Blame, error: ErrorInfo) -> None:
        """Something failed. What failed first makes the rest fail: wait a moment, then name the likeliest cause."""
        self._signs.append((blame, error))
        if len(self._signs) == 1 and not self.ended.is_set():
            self.jobs.close()  # what comes now is for another pool
            self._watch(self._judge())

    async def _judge(self) -> None:
        await asyncio.sleep(BLAME_SECONDS)
        self.jobs.blame(self.jobs.active)
        self._die(min(self._signs, key=lambda sign: sign[0])[1])  # of several alike the one that was noticed first

    def _die(self, error: ErrorInfo) -> None:
        """The unit of failure is the pool: whatever failed, nothing in it is trusted any more."""
        if self.ended.is_set():
            return
        self.error = error
        self.jobs.close()
        self.log.write(f"pool ends: {error.cause}\n{error.traceback}")
        self.ended.set()

    async def _report_death(self, error: ErrorInfo) -> None:
        rank, active = error.rank or 0, self.jobs.active
        if active is not None:
            await self.client.send(Failed(active.number, rank, error, unbegun=active.unread, pool_alive=False))
        await self.client.send(self.status())


Handler = Callable[[Supervisor, Frame, Any], Awaitable[None]]  # gets the frame as it came, and the message in it
OF_CLIENT: dict[type, Handler] = {
    protocol.Job: lambda pool, frame, job: pool.jobs.begin(frame, job),
    protocol.Cancel: lambda pool, _, cancel: pool.jobs.cancel(cancel),
    protocol.AskStatus: lambda pool, *_: pool.client.send(pool.status()),
}
"""Who answers what the client says, but for the end."""
OF_RANK: dict[type, Handler] = {
    protocol.Online: lambda pool, _, online: pool.arrive(online),
    protocol.Lost: lambda pool, _, lost: pool.members.lose(lost.rank),
    **dict.fromkeys((protocol.Doing, protocol.Progress), lambda pool, frame, message: pool.tell(frame, message)),
    **dict.fromkeys(
        (protocol.Ready, protocol.Done, Failed), lambda pool, frame, answer: pool.jobs.answer(frame, answer)
    ),
}
"""Who answers what a rank says, but for its heartbeat."""
