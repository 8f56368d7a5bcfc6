"""The supervisor: a small process between ComfyUI and the ranks. It imports no torch.

It starts torchrun, hands each job to every rank, brings the answers together, and ends the whole pool as soon as the
client is gone or any part of the pool fails. The client runs it as
`python -m workers.supervisor FD CLIENT DIRECTORY LOG DEVICES RANK_MODULE`; FD is one end of a socket pair whose other
end the client holds, CLIENT is the client's pid.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import socket
import sys
import time
import traceback
from pathlib import Path

import msgspec

from parallel_runtime.errors import ParallelError
from parallel_runtime.said import Said, said, together

from ..compiled_cache import prune
from ..launch import PoolSpec, rank_environment, state_directory, torchrun_command
from ..network import interface_of, read_meeting
from ..pool_log import PoolLog, tell_of_fresh_pool
from ..processes import become_subreaper, end_descendants
from ..settings import read_seconds
from ..wire.endpoint import Endpoint
from ..wire.error_info import ErrorInfo, describe
from ..wire.frames import Frame
from ..wire.protocol import Failed, PoolState, Status
from ..wire.unix_socket import listen_in
from .jobs import Jobs
from .members import Members
from .messages import Messages
from .reception import BACKLOG, Reception
from .stall import FLOOR_SECONDS, TICK_SECONDS
from .torchrun import Torchrun
from .verdict import BLAME_SECONDS, Blame, Verdict

START_SECONDS = 300.0
EXIT_GRACE_SECONDS = 2.0
DUMP_SECONDS = 0.7
PUMP_SECONDS = 1.0
REPORT_SECONDS = 5.0


class Supervisor:
    """The pool as one object: its start, its state, and its end."""

    def __init__(
        self, client: socket.socket, parent: int, spec: PoolSpec, directory: Path, log: PoolLog, rank_module: str
    ):
        self.client = Endpoint(client, "client")
        self.spec = spec
        self.directory = directory
        self.log = log
        self.rank_module = rank_module
        self.members = Members(spec, log, self._from_rank, self._lost, on_unread=self._rank_never_read)
        self.jobs = Jobs(self.members, self.client, log, self._rank_failed)
        self.torchrun: Torchrun | None = None
        self.error: ErrorInfo | None = None
        self._parent = parent
        self._hearing: asyncio.Task[None] | None = None
        self._verdict = Verdict()
        self._ended = asyncio.Event()
        self._messages = Messages(self.client, self.members, self.jobs, self.status, self._ended.set)
        self._tasks: set[asyncio.Task[None]] = set()

    async def run(self) -> None:
        """Live until the client leaves or the pool fails; then take everything down."""
        self._watch(self._serve_client())
        self._watch(self._watch_client())
        start = self._watch(self._start())
        self._watch(asyncio.to_thread(prune, state_directory() / "compiled"))
        await self._ended.wait()
        await asyncio.wait([start])
        await end_descendants(EXIT_GRACE_SECONDS if self.error is None else 0.0)
        if self.torchrun is not None:
            await self.torchrun.wait()
        if self._hearing is not None:
            await asyncio.wait([self._hearing], timeout=PUMP_SECONDS)
        for task in self._tasks:
            task.cancel()
        if self.error is not None:
            with contextlib.suppress(asyncio.TimeoutError):  # a client that is stopped reads nothing
                await asyncio.wait_for(self._report_death(self.error), REPORT_SECONDS)

    async def _start(self) -> None:
        """Listen, and start the ranks. What fails here is the pool's death, with its cause."""
        start_seconds = read_seconds(os.environ, "PARALLEL_DIT_START_SECONDS", START_SECONDS)
        self.jobs.stall.floor = read_seconds(os.environ, "PARALLEL_DIT_STALL_SECONDS", FLOOR_SECONDS)
        reception = Reception(self.log, self.members.welcome, self._watch)
        self._watch(reception.open(listen_in(self.directory, BACKLOG)))
        interface, where = "lo", ""
        if self.spec.hosts > 1:
            meeting = read_meeting(os.environ)
            meeting.check_free()
            interface, where = interface_of(meeting.address), str(meeting)
        environment = rank_environment(self.spec, self.directory, os.environ, interface)
        command = torchrun_command(self.spec, self.directory, self.rank_module, where)
        torchrun = await Torchrun.start(command, environment, self.log)
        self.torchrun = torchrun
        self._hearing = self._watch(torchrun.hear())
        self._watch(self._watch_torchrun(torchrun))
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
        torchrun = self.torchrun.pid if self.torchrun is not None else 0
        job = self.jobs.active.number if self.jobs.active else None
        pids, devices = dict(self.members.pids), dict(self.members.devices)
        return Status(self.state, pids, devices, torchrun, str(self.log.path), job, self.error)

    async def _serve_client(self) -> None:
        while not self._ended.is_set() and (frame := await self.client.receive()) is not None:
            await self._messages.from_client(frame)
        self._ended.set()

    async def _from_rank(self, rank: int, frame: Frame) -> None:
        await self._messages.from_rank(rank, frame)

    async def _watch_torchrun(self, torchrun: Torchrun) -> None:
        self._lost(*await torchrun.end())

    async def _watch_client(self) -> None:
        """End with the client, also where another process holds a copy of its end of the socket: one it forked."""
        while os.getppid() == self._parent:
            await asyncio.sleep(TICK_SECONDS)
        self._ended.set()

    async def _watch_start(self, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while self.state == "starting" and time.monotonic() < deadline:
            await asyncio.sleep(0.2)
        if self.state == "starting":
            self._die(
                self._loss(said("{what} within {seconds} seconds", what=self.members.missing, seconds=f"{seconds:g}"))
            )

    async def _watch_stall(self) -> None:
        while True:
            await asyncio.sleep(TICK_SECONDS)
            if self.client.sending:  # it is stopped or busy, and a rank's messages wait for it
                self.jobs.stall.waited(time.monotonic())
            stall = self.jobs.stall.tick(time.monotonic())
            if stall is not None:
                self.members.dump_stacks()
                await asyncio.sleep(DUMP_SECONDS)
                self._die(self._loss(self.members.stalled(stall.rank, stall.seconds), with_stacks=True))

    def _loss(self, what: Said, with_stacks: bool = False) -> ErrorInfo:
        idle = self.jobs.active is None or self.jobs.active.unread
        template = "{what} while the workers were idle." if idle else "{what} in the middle of a job."
        if self.state == "starting":
            template = "{what} while the workers started."
        cause = said(template, what=what)
        return ErrorInfo("PoolError", cause, self._fresh(with_stacks), traceback=self.log.tail())

    def _fresh(self, with_stacks: bool = False) -> Said:
        return tell_of_fresh_pool(self.log.path, with_stacks)

    def _rank_failed(self, failed: Failed) -> None:
        blame = Blame.COLLECTIVE_BROKE if failed.error.consequence else Blame.RANK_FAILED
        fix = together((failed.error.fix, self._fresh()))
        self._suspect(blame, msgspec.structs.replace(failed.error, fix=fix))

    def _rank_never_read(self, rank: int) -> None:
        if self.jobs.active is not None and not self._verdict.of_rank:
            self.jobs.active.note_unread(rank)

    def _lost(self, blame: Blame, what: Said) -> None:
        self._suspect(blame, self._loss(what))

    def _suspect(self, blame: Blame, error: ErrorInfo) -> None:
        """Something failed. What failed first makes the rest fail: wait a moment, then name the likeliest cause."""
        if self._verdict.note(blame, error) and not self._ended.is_set():
            self.jobs.close()  # what comes now is for another pool
            self._watch(self._judge())

    async def _judge(self) -> None:
        await asyncio.sleep(BLAME_SECONDS)
        self.jobs.blame(self.jobs.active)
        self._die(self._verdict.cause)

    def _die(self, error: ErrorInfo) -> None:
        """The unit of failure is the pool: whatever failed, nothing in it is trusted any more."""
        if self._ended.is_set():
            return
        self.error = error
        self.jobs.close()
        self.log.write(f"pool ends: {error.cause}\n{error.traceback}")
        self._ended.set()

    async def _report_death(self, error: ErrorInfo) -> None:
        rank, active = error.rank or 0, self.jobs.active
        if active is not None:
            await self.client.send(Failed(active.number, rank, error, unbegun=active.unread, pool_alive=False))
        for number in self.jobs.waiting:
            await self.client.send(Failed(number, rank, error, unbegun=True, pool_alive=False))
        await self.client.send(self.status())


def main() -> None:
    """Process entry; see the module's docstring for the arguments."""
    descriptor, parent, directory, log_path, spec, rank_module = sys.argv[1:7]
    become_subreaper()
    client = socket.socket(fileno=int(descriptor))
    log = PoolLog(Path(log_path))
    try:
        pool = PoolSpec.parse(spec)
        asyncio.run(Supervisor(client, int(parent), pool, Path(directory), log, rank_module).run())
    finally:
        shutil.rmtree(directory, ignore_errors=True)  # the client may be gone, so it is removed here
