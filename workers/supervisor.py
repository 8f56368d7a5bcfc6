"""The supervisor: a small process between ComfyUI and the ranks. It imports no torch.

It starts torchrun, hands each job to every rank, brings the answers together, and ends the whole pool as soon as the
client is gone or any part of the pool fails. The client runs it as
`python -m workers.supervisor FD DIRECTORY LOG DEVICES RANK_MODULE`; FD is one end of a socket pair whose other end
the client holds.
"""

from __future__ import annotations

import asyncio
import contextlib
import enum
import os
import shutil
import socket
import sys
import time
from collections import deque
from pathlib import Path

import msgspec

from .frames import Frame, FrameError
from .job import ActiveJob
from .launch import PACK_ROOT, PoolSpec, rank_environment, torchrun_command
from .network import interface_of, listen, read_network
from .peer import Peer
from .pool_log import PoolLog
from .processes import DUMP_STACKS, become_subreaper, end_descendants, spawn
from .protocol import (
    Abandon,
    AskStatus,
    Cancel,
    Done,
    ErrorInfo,
    Failed,
    Heartbeat,
    Job,
    Join,
    Message,
    Online,
    PoolState,
    Progress,
    Ready,
    Run,
    Shutdown,
    StartRanks,
    Status,
    describe,
)
from .reception import Guest, Reception
from .stall import TICK_SECONDS, StallWatch

START_SECONDS = float(os.environ.get("PARALLEL_DIT_START_SECONDS", 300.0))
EXIT_GRACE_SECONDS = 2.0
BLAME_SECONDS = 0.3
DUMP_SECONDS = 0.7
PUMP_SECONDS = 1.0


class Blame(enum.IntEnum):
    """Signs of a failure, likeliest cause first."""

    HOST_LOST = 0
    TORCHRUN_KILLED = 1
    RANK_FAILED = 2
    RANK_ENDED = 3
    TORCHRUN_ENDED = 4
    COLLECTIVE_BROKE = 5


class Supervisor:
    """The pool as one object: its state, its connections, its job."""

    def __init__(self, client: socket.socket, spec: PoolSpec, directory: Path, log: PoolLog, rank_module: str):
        self.client = Peer(client, "client")
        self.spec = spec
        self.directory = directory
        self.log = log
        self.rank_module = rank_module
        self.state: PoolState = "starting"
        self.ranks: dict[int, Peer] = {}
        self.pids: dict[int, int] = {}
        self.devices: dict[int, str] = {}
        self.remote: dict[int, str] = {}
        self.hosts: list[str] = []
        self.network = read_network(os.environ) if spec.hosts > 1 else None
        self.torchrun: asyncio.subprocess.Process | None = None
        self.job: ActiveJob | None = None
        self.waiting: deque[Frame] = deque()
        self.error: ErrorInfo | None = None
        self.stall = StallWatch()
        self._suspects: list[tuple[Blame, ErrorInfo]] = []
        self._ended = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()

    async def run(self) -> None:
        """Live until the client leaves or the pool fails; then take everything down."""
        reception = Reception(self.log, self._welcome, self._watch)
        listeners = [self._listen()]
        self._watch(reception.local(listeners[0]))
        self._watch(self._serve_client())
        interface, rendezvous = "lo", ""
        if self.network is not None:
            listeners.append(listen(self.network, self.spec.world_size))
            self._watch(reception.remote(listeners[1], self.network.secret))
            interface = interface_of(self.network.address)
            rendezvous = f"{self.network.address}:{self.network.rendezvous_port}"
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

    async def _welcome(self, guest: Guest) -> None:
        if isinstance(guest.hello, Join):
            await self._serve_host(guest, guest.hello)
        elif guest.hello.rank in self.ranks or guest.hello.rank not in range(self.spec.world_size):
            self.log.write(f"refused a connection from {guest.peer.name}, which is no rank that is awaited")
            guest.peer.socket.close()
        else:
            await self._serve_rank(guest, guest.hello.rank)

    async def _serve_rank(self, guest: Guest, rank: int) -> None:
        self.ranks[rank], self.pids[rank] = guest.peer, guest.pid
        if guest.host:
            self.remote[rank] = guest.host
        while (frame := await guest.peer.receive()) is not None:
            await self._from_rank(rank, frame)
        where = f" on {guest.host}" if guest.host else ""
        self._suspect(Blame.RANK_ENDED, self._loss(f"Rank {rank} (process {guest.pid}{where}) ended"))

    async def _serve_host(self, guest: Guest, join: Join) -> None:
        node = len(self.hosts) + 1
        if self.network is None or node >= self.spec.hosts or join.devices != len(self.spec.devices):
            self.log.write(f"refused host {join.name} ({guest.host}) with {join.devices} devices")
            guest.peer.socket.close()
            return
        self.hosts.append(join.name)
        rendezvous = f"{self.network.address}:{self.network.rendezvous_port}"
        ranks = len(self.spec.devices)
        start = StartRanks(node, self.spec.hosts, ranks, self.spec.device_type, rendezvous, self.rank_module)
        await guest.peer.send(start)
        await guest.peer.receive()  # it says nothing more: this returns at its end
        self._suspect(Blame.HOST_LOST, self._loss(f"Host {join.name} ({guest.host}) dropped off"))

    async def _from_rank(self, rank: int, frame: Frame) -> None:
        message = frame.message
        now = time.monotonic()
        if isinstance(message, Heartbeat):
            self.stall.beat(rank, message.progress, now)
            return
        self.stall.answered(rank, now)
        if isinstance(message, Online):
            self.devices[rank] = message.device
            if len(self.devices) == self.spec.world_size:
                self.state = "idle"
                await self.client.send(self.status())
                await self._next_job()
            return
        if isinstance(message, Progress):
            self.stall.step(now)
            await self.client.forward(frame)
            return
        if self.job is None or not isinstance(message, (Ready, Done, Failed)):
            return
        self.job.answer(frame)
        await self._advance(self.job)

    async def _advance(self, job: ActiveJob) -> None:
        if job.phase == "preparing" and job.prepared:
            if job.failed:
                await self._abandon(job)
            else:
                job.phase = "running"
                self.stall.start(self.spec.world_size, time.monotonic())
                self.state = "running"
                await self._to_ranks(Run(job.number))
                if job.cancelled:
                    await self._to_ranks(Cancel(job.number))
        elif job.phase == "running" and job.failed:
            for failed in job.failed.values():
                blame = Blame.COLLECTIVE_BROKE if failed.error.consequence else Blame.RANK_FAILED
                fix = f"{failed.error.fix} {self._fresh()}".strip()
                self._suspect(blame, msgspec.structs.replace(failed.error, fix=fix))
        elif job.finished:
            self._rest()
            assert job.result is not None
            await self.client.forward(job.result)
            await self._next_job()

    async def _abandon(self, job: ActiveJob) -> None:
        await self._to_ranks(Abandon(job.number))
        self._rest()
        failure = job.failure
        error = failure.error if failure.error.fix else msgspec.structs.replace(failure.error, fix=self._see_log())
        await self.client.send(msgspec.structs.replace(failure, error=error, fits=tuple(sorted(job.ready))))
        await self._next_job()

    def _see_log(self) -> str:
        return f"The log is {self.log.path}."

    def _rest(self) -> None:
        self.job = None
        self.state = "idle"
        self.stall.stop()

    async def _to_ranks(self, message: Message) -> None:
        for peer in self.ranks.values():
            await peer.send(message)

    async def _next_job(self) -> None:
        if self.state != "idle" or not self.waiting:
            return
        frame = self.waiting.popleft()
        assert isinstance(frame.message, Job)
        self.job = ActiveJob(frame.message.number, self.spec.world_size)
        self.state = "preparing"
        self.stall.start(self.spec.world_size, time.monotonic())
        for rank, peer in self.ranks.items():
            await peer.forward(frame, with_payload=rank == 0)

    async def _serve_client(self) -> None:
        while (frame := await self.client.receive()) is not None:
            message = frame.message
            if isinstance(message, Job):
                self.waiting.append(frame)
                await self._next_job()
            elif isinstance(message, Cancel):
                await self._cancel(message)
            elif isinstance(message, AskStatus):
                await self.client.send(self.status())
            elif isinstance(message, Shutdown):
                break
        self._ended.set()

    async def _cancel(self, message: Cancel) -> None:
        if self.job is not None and self.job.number == message.number:
            self.job.cancelled = True
            await self._to_ranks(message)
            return
        kept = deque(frame for frame in self.waiting if getattr(frame.message, "number", None) != message.number)
        if len(kept) < len(self.waiting):
            self.waiting = kept
            await self.client.send(Failed(message.number, 0, ErrorInfo("PoolError", "Cancelled.", ""), cancelled=True))

    def status(self) -> Status:
        """The pool as the client may ask for it at any time."""
        torchrun = self.torchrun.pid if self.torchrun else 0
        job = self.job.number if self.job else None
        return Status(self.state, self.pids, self.devices, torchrun, str(self.log.path), job, self.error)

    async def _pump_log(self) -> None:
        assert self.torchrun is not None
        assert self.torchrun.stdout is not None
        while line := await self.torchrun.stdout.readline():
            self.log.write(line.decode(errors="replace").rstrip())

    async def _watch_torchrun(self) -> None:
        assert self.torchrun is not None
        code = await self.torchrun.wait()
        blame = Blame.TORCHRUN_KILLED if code < 0 else Blame.TORCHRUN_ENDED
        self._suspect(blame, self._loss(f"torchrun (process {self.torchrun.pid}) ended with code {code}"))

    async def _watch_start(self) -> None:
        deadline = time.monotonic() + START_SECONDS
        while self.state == "starting" and time.monotonic() < deadline:
            await asyncio.sleep(0.2)
        if self.state == "starting":
            missing = sorted(set(range(self.spec.world_size)) - set(self.devices))
            absent = self.spec.hosts - 1 - len(self.hosts)
            what = f"{absent} of {self.spec.hosts} hosts did not join" if absent else f"Ranks {missing} did not start"
            self._die(self._loss(f"{what} within {START_SECONDS:.0f} seconds"))

    async def _watch_stall(self) -> None:
        while True:
            await asyncio.sleep(TICK_SECONDS)
            stall = self.stall.tick(time.monotonic())
            if stall is not None:
                for pid in (pid for rank, pid in self.pids.items() if rank not in self.remote):
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(pid, DUMP_STACKS)
                await asyncio.sleep(DUMP_SECONDS)
                pid = self.pids[stall.rank]
                what = f"Rank {stall.rank} (process {pid}) made no progress for {stall.seconds:.0f} seconds"
                self._die(self._loss(what, "with the stacks of all ranks "))

    def _loss(self, what: str, log_holds: str = "") -> ErrorInfo:
        doing = {"starting": "while the pool started", "idle": "while the pool was idle"}.get(
            self.state, "in the middle of a job"
        )
        return ErrorInfo("PoolError", f"{what} {doing}.", self._fresh(log_holds), traceback=self.log.tail())

    def _fresh(self, log_holds: str = "") -> str:
        return f"The next prompt starts a fresh pool; the log {log_holds}is {self.log.path}."

    def _suspect(self, blame: Blame, error: ErrorInfo) -> None:
        """Something failed. What failed first makes the rest fail: wait a moment, then name the likeliest cause."""
        self._suspects.append((blame, error))
        if len(self._suspects) == 1 and not self._ended.is_set():
            self._watch(self._judge())

    async def _judge(self) -> None:
        await asyncio.sleep(BLAME_SECONDS)
        self._die(min(self._suspects, key=lambda suspect: suspect[0])[1])

    def _die(self, error: ErrorInfo) -> None:
        """The unit of failure is the pool: whatever failed, nothing in it is trusted any more."""
        if self._ended.is_set():
            return
        self.error = error
        self.state = "dead"
        self.log.write(f"pool ends: {error.cause}\n{error.traceback}")
        self._ended.set()

    async def _report_death(self, error: ErrorInfo) -> None:
        numbers = [self.job.number] if self.job else []
        numbers += [frame.message.number for frame in self.waiting if isinstance(frame.message, Job)]
        for number in numbers:
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
