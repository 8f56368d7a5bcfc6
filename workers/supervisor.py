"""The supervisor: a small process between ComfyUI and the ranks. It imports no torch.

It starts torchrun, hands each job to every rank, brings the answers together, and ends the whole pool as soon as the
client is gone or any part of the pool fails. The client runs it as
`python -m workers.supervisor FD DIRECTORY LOG DEVICES RANK_MODULE`; FD is one end of a socket pair whose other end
the client holds.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import socket
import sys
import time
from pathlib import Path

import msgspec

from .frames import Frame, FrameError
from .jobs import Jobs
from .launch import PACK_ROOT, PoolSpec, rank_environment, torchrun_command
from .members import Members
from .network import interface_of, listen, read_network
from .peer import Peer
from .pool_log import PoolLog
from .processes import become_subreaper, end_descendants, spawn
from .protocol import (
    AskStatus,
    Cancel,
    ErrorInfo,
    Failed,
    Heartbeat,
    Job,
    Online,
    PoolState,
    Shutdown,
    Status,
    describe,
)
from .reception import Reception
from .stall import TICK_SECONDS
from .verdict import Blame, Verdict

START_SECONDS = float(os.environ.get("PARALLEL_DIT_START_SECONDS", 300.0))
EXIT_GRACE_SECONDS = 2.0
BLAME_SECONDS = 0.3
DUMP_SECONDS = 0.7
PUMP_SECONDS = 1.0


class Supervisor:
    """The pool as one object: its start, its state, and its end."""

    def __init__(self, client: socket.socket, spec: PoolSpec, directory: Path, log: PoolLog, rank_module: str):
        self.client = Peer(client, "client")
        self.spec = spec
        self.directory = directory
        self.log = log
        self.rank_module = rank_module
        self.network = read_network(os.environ) if spec.hosts > 1 else None
        self.members = Members(spec, self.network, rank_module, log, self._from_rank, self._lost)
        self.jobs = Jobs(self.members, self.client, spec.world_size, log, self._rank_failed)
        self.torchrun: asyncio.subprocess.Process | None = None
        self.error: ErrorInfo | None = None
        self._verdict = Verdict()
        self._ended = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()

    async def run(self) -> None:
        """Live until the client leaves or the pool fails; then take everything down."""
        reception = Reception(self.log, self.members.welcome, self._watch)
        listeners = [self._listen()]
        self._watch(reception.local(listeners[0]))
        self._watch(self._serve_client())
        interface, rendezvous = "lo", ""
        if self.network is not None:
            listeners.append(listen(self.network, self.spec.world_size))
            self._watch(reception.remote(listeners[1], self.network.secret))
            interface = interface_of(self.network.address)
            rendezvous = self.network.rendezvous
        command = torchrun_command(self.spec, self.directory, self.rank_module, rendezvous=rendezvous)
        environment = rank_environment(self.spec, self.directory, os.environ, interface)
        self.torchrun = await spawn(command, environment, str(PACK_ROOT))
        pump = self._watch(self._pump_log())
        self._watch(self._watch_torchrun())
        self._watch(self._watch_start())
        self._watch(self._watch_stall())
        await self._ended.wait()
        for listener in listeners:
            listener.close()
        await end_descendants(EXIT_GRACE_SECONDS if self.error is None else 0.0)
        await self.torchrun.wait()
        await asyncio.wait([pump], timeout=PUMP_SECONDS)
        for task in self._tasks:
            task.cancel()
        if self.error is not None:
            await self._report_death(self.error)

    def _watch(self, coroutine) -> asyncio.Task[None]:
        task = asyncio.ensure_future(self._guard(coroutine))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def _guard(self, coroutine) -> None:
        try:
            await coroutine
        except FrameError as error:
            self._die(describe(error, None))
        except Exception as error:  # noqa: BLE001 - process border: a fault of ours must end the pool, not hang it
            self.log.write(f"supervisor: {error!r}")
            self._die(describe(error, None))

    def _listen(self) -> socket.socket:
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        listener.bind(str(self.directory / "ranks.socket"))
        listener.listen(self.spec.world_size)
        listener.setblocking(False)
        return listener

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
        torchrun = self.torchrun.pid if self.torchrun else 0
        job = self.jobs.active.number if self.jobs.active else None
        members = self.members
        return Status(self.state, members.pids, members.devices, torchrun, str(self.log.path), job, self.error)

    async def _serve_client(self) -> None:
        while (frame := await self.client.receive()) is not None:
            message = frame.message
            if isinstance(message, Job):
                await self.jobs.add(frame)
            elif isinstance(message, Cancel):
                await self.jobs.cancel(message)
            elif isinstance(message, AskStatus):
                await self.client.send(self.status())
            elif isinstance(message, Shutdown):
                break
        self._ended.set()

    async def _from_rank(self, rank: int, frame: Frame) -> None:
        message = frame.message
        now = time.monotonic()
        if isinstance(message, Heartbeat):
            self.jobs.stall.beat(rank, message.progress, now)
            return
        self.jobs.stall.answered(rank, now)
        if isinstance(message, Online):
            self.members.devices[rank] = message.device
            if self.members.complete:
                await self.client.send(self.status())
                await self.jobs.open()
        else:
            await self.jobs.answer(frame)

    async def _pump_log(self) -> None:
        assert self.torchrun is not None
        assert self.torchrun.stdout is not None
        while line := await self.torchrun.stdout.readline():
            self.log.write(line.decode(errors="replace").rstrip())

    async def _watch_torchrun(self) -> None:
        assert self.torchrun is not None
        code = await self.torchrun.wait()
        blame = Blame.TORCHRUN_KILLED if code < 0 else Blame.TORCHRUN_ENDED
        self._lost(blame, f"torchrun (process {self.torchrun.pid}) ended with code {code}")

    async def _watch_start(self) -> None:
        deadline = time.monotonic() + START_SECONDS
        while self.state == "starting" and time.monotonic() < deadline:
            await asyncio.sleep(0.2)
        if self.state == "starting":
            self._die(self._loss(f"{self.members.missing} within {START_SECONDS:.0f} seconds"))

    async def _watch_stall(self) -> None:
        while True:
            await asyncio.sleep(TICK_SECONDS)
            stall = self.jobs.stall.tick(time.monotonic())
            if stall is not None:
                self.members.dump_stacks()
                await asyncio.sleep(DUMP_SECONDS)
                pid = self.members.pids[stall.rank]
                what = f"Rank {stall.rank} (process {pid}) made no progress for {stall.seconds:.0f} seconds"
                self._die(self._loss(what, "with the stacks of all ranks "))

    def _loss(self, what: str, log_holds: str = "") -> ErrorInfo:
        doing = {"starting": "while the pool started", "idle": "while the pool was idle"}.get(
            self.state, "in the middle of a job"
        )
        return ErrorInfo("PoolError", f"{what} {doing}.", self._fresh(log_holds), traceback=self.log.tail())

    def _fresh(self, log_holds: str = "") -> str:
        return f"The next prompt starts a fresh pool; the log {log_holds}is {self.log.path}."

    def _rank_failed(self, failed: Failed) -> None:
        blame = Blame.COLLECTIVE_BROKE if failed.error.consequence else Blame.RANK_FAILED
        fix = f"{failed.error.fix} {self._fresh()}".strip()
        self._suspect(blame, msgspec.structs.replace(failed.error, fix=fix))

    def _lost(self, blame: Blame, what: str) -> None:
        self._suspect(blame, self._loss(what))

    def _suspect(self, blame: Blame, error: ErrorInfo) -> None:
        """Something failed. What failed first makes the rest fail: wait a moment, then name the likeliest cause."""
        if self._verdict.note(blame, error) and not self._ended.is_set():
            self._watch(self._judge())

    async def _judge(self) -> None:
        await asyncio.sleep(BLAME_SECONDS)
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
        for number in self.jobs.numbers:
            await self.client.send(Failed(number, error.rank or 0, error, pool_alive=False))
        await self.client.send(self.status())


def main() -> None:
    """Process entry; see the module's docstring for the arguments."""
    descriptor, directory, log_path, spec, rank_module = sys.argv[1:6]
    become_subreaper()
    client = socket.socket(fileno=int(descriptor))
    log = PoolLog(Path(log_path))
    try:
        asyncio.run(Supervisor(client, PoolSpec.parse(spec), Path(directory), log, rank_module).run())
    finally:
        shutil.rmtree(directory, ignore_errors=True)  # the client may be gone, so it is removed here


if __name__ == "__main__":
    main()
