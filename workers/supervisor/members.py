"""Who is in a pool: its ranks, here and on other machines. The supervisor's side of their processes and connections,
which nobody else can make: those of this pool that it has started itself."""

from __future__ import annotations

import asyncio
import contextlib
import enum
import os
import socket
import struct
from collections import defaultdict
from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import Any

from parallel_runtime.errors import ConfigurationError
from parallel_runtime.said import Said, said

from ..launch import OWN_SESSION, PoolSpec
from ..leftovers import DUMP_STACKS, die_with_parent, is_descendant
from ..state_folder import PoolLog
from ..wire.connection import Endpoint
from ..wire.frames import Frame, FrameError
from ..wire.protocol import Hello, Message, Online

HELLO_SECONDS = 10.0
ACCEPT_PAUSE_SECONDS = 0.2
POLL_SECONDS = 0.1
PUMP_SECONDS = 1.0


class Blame(enum.IntEnum):
    """Signs of a failure, likeliest cause first: one failure shows in many places at once."""

    HOST_LOST = 0
    TORCHRUN_KILLED = 1
    RANK_FAILED = 2
    RANK_ENDED = 3
    PROCESS_ENDED = 4
    COLLECTIVE_BROKE = 5


class Members:
    """Awaits the end of each process, and serves each connection until its end. Both are losses: nobody leaves a pool
    that goes on. Ranks of this machine have a connection each; rank 0's is that of ranks on other machines as well.

    `on_loss` gets the sign that a loss is, who was lost, in words, and the rank where it ended with something unread;
    `watch` has something go on beside."""

    def __init__(
        self, spec: PoolSpec, log: PoolLog, on_frame: Callable[[int, Frame], Coroutine[Any, Any, None]],
        on_loss: Callable[[Blame, Said, int | None], None],
        watch: Callable[[Coroutine[Any, Any, None]], asyncio.Task[None]],
    ):  # fmt: skip
        self.size = spec.world_size  # ranks of the pool
        self.pids: dict[int, int] = {}  # processes of this machine
        self.devices: dict[int, str] = {}  # what each rank computes on; a rank is here once it is online
        self._spec = spec
        self._log = log
        self._on_frame = on_frame
        self._on_loss = on_loss
        self._watch = watch
        self._processes: list[asyncio.subprocess.Process] = []
        self._hearing: list[asyncio.Task[None]] = []
        self._endpoints: dict[int, Endpoint] = {}
        self._hosts: defaultdict[int, str] = defaultdict(lambda: "?")

    @property
    def complete(self) -> bool:
        """Every rank is online."""
        return len(self.devices) == self.size

    @property
    def missing(self) -> Said:
        """Who did not come, in words."""
        if self._spec.hosts > 1 and not self._endpoints:  # torchrun starts no rank before all machines are there
            return said("Not all of the {hosts} hosts joined", hosts=self._spec.hosts)
        ranks = [rank for rank in range(self.size) if rank not in self.devices]
        return said("Workers {ranks} did not start", ranks=ranks)

    async def start(self, command: Sequence[str], environment: Mapping[str, str]) -> None:
        """Start a rank, or torchrun where several machines meet. It ends with this process, and the ranks with it."""
        parent = os.getpid()
        process = await asyncio.create_subprocess_exec(
            *command, env=dict(environment), stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT,
            preexec_fn=lambda: die_with_parent(parent), limit=1 << 20, **OWN_SESSION,
        )  # fmt: skip
        self._processes.append(process)
        rank = environment.get("RANK")
        self._hearing.append(self._watch(self._hear(process, "" if rank is None else f"[rank {rank}] ")))
        self._watch(self._see_end(process, rank))

    async def _hear(self, process: asyncio.subprocess.Process, prefix: str) -> None:
        """Write the log, to the end of what a process and those that it starts say."""
        assert process.stdout is not None
        while line := await process.stdout.readline():
            self._log.write(prefix + line.decode(errors="replace").rstrip())

    async def _see_end(self, process: asyncio.subprocess.Process, rank: str | None) -> None:
        """Tell of a process's end. Its `wait` returns only when its output has ended as well, which children hold that
        are still there: ranks that have come no further than their imports."""
        while (code := process.returncode) is None:
            await asyncio.sleep(POLL_SECONDS)
        if rank is None:
            what = said("torchrun (process {pid}) ended with code {code}", pid=process.pid, code=code)
            self._on_loss(Blame.TORCHRUN_KILLED if code < 0 else Blame.PROCESS_ENDED, what, None)
        else:
            await asyncio.sleep(POLL_SECONDS)  # its connection's end, where it had one, is seen first
            template = "Worker {rank} (process {pid}) ended with code {code}"
            self._on_loss(Blame.PROCESS_ENDED, said(template, rank=rank, pid=process.pid, code=code), None)

    async def wait(self) -> None:
        """Wait until all that was started has ended, and is in the log."""
        for process in self._processes:
            await process.wait()
        if self._hearing:
            await asyncio.wait(self._hearing, timeout=PUMP_SECONDS)

    async def open(self, listener: socket.socket) -> None:
        """Take in processes of this user that the pool itself has started. A stranger is hung up on."""
        failed = False
        while True:
            try:
                connection, _ = await asyncio.get_running_loop().sock_accept(listener)
            except OSError as error:  # descriptors or memory ran out, or the other side has hung up already
                if not failed:
                    self._log.write(f"cannot accept a connection now: {error}")
                failed = True
                await asyncio.sleep(ACCEPT_PAUSE_SECONDS)
                continue
            failed = False
            credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
            pid, uid, _ = struct.unpack("3i", credentials)
            if uid != os.getuid():
                self._refuse(connection, f"user {uid} (pid {pid})")
            elif not is_descendant(pid):
                self._refuse(connection, f"pid {pid}, which this pool did not start")
            else:
                self._watch(self._greet(Endpoint(connection), pid))

    async def _greet(self, endpoint: Endpoint, pid: int) -> None:
        try:
            frame = await asyncio.wait_for(endpoint.receive(), HELLO_SECONDS)
        except (FrameError, asyncio.TimeoutError) as error:
            self._refuse(endpoint.socket, f"pid {pid}: {error!r}")
            return
        if frame is None or not isinstance(frame.message, Hello):
            self._refuse(endpoint.socket, f"pid {pid}, which did not say who it is")
        elif frame.message.rank in self._endpoints or frame.message.rank not in range(self.size):
            self._refuse(endpoint.socket, f"pid {pid}, which is no rank that is awaited")
        else:
            await self._serve(endpoint, frame.message, pid)

    def _refuse(self, connection: socket.socket, who: str) -> None:
        self._log.write(f"refused a connection from {who}")
        connection.close()

    async def _serve(self, endpoint: Endpoint, hello: Hello, pid: int) -> None:
        """Serve a rank's connection until its end."""
        rank = hello.rank
        if self._spec.hosts > 1 and hello.world_size != self.size:
            text = "The hosts bring {count} workers, not {size}."
            fix = "Give {each} to --nproc-per-node on each of them."
            raise ConfigurationError(text, fix, count=hello.world_size, size=self.size, each=len(self._spec.devices))
        self._endpoints[rank], self.pids[rank] = endpoint, pid
        while (frame := await endpoint.receive()) is not None:
            await self._on_frame(getattr(frame.message, "rank", rank), frame)
        what = said("Worker {rank} (process {pid}) ended", rank=rank, pid=pid)
        self._on_loss(Blame.RANK_ENDED, what, rank if endpoint.left_unread else None)

    def arrive(self, online: Online) -> None:
        """A rank has its device."""
        kind = online.device.split(":")[0]
        if kind != self._spec.device_type:
            what = "Host {host} computes on {kind}, this one on {own}."
            fix = "See which GPUs torch finds there, and what CUDA_VISIBLE_DEVICES says."
            raise ConfigurationError(what, fix, host=online.host, kind=kind, own=self._spec.device_type)
        self.devices[online.rank] = online.device
        self._hosts[online.rank] = online.host

    async def lose(self, rank: int) -> None:
        """Rank 0 says that this one, on another machine, is gone."""
        what = said("Worker {rank} on host {host} was lost", rank=rank, host=self._hosts[rank])
        self._on_loss(Blame.HOST_LOST, what, None)

    def stalled(self, rank: int, seconds: float) -> Said:
        """That a rank does not get on, in words."""
        value = f"{seconds:.0f}"
        if rank in self.pids:
            template = "Worker {rank} (process {pid}) made no progress for {seconds} seconds"
            return said(template, rank=rank, pid=self.pids[rank], seconds=value)
        template = "Worker {rank} on host {host} made no progress for {seconds} seconds"
        return said(template, rank=rank, host=self._hosts[rank], seconds=value)

    async def tell(self, message: Message) -> None:
        """Send a message to every rank of the pool; rank 0 passes it on to other machines."""
        for endpoint in list(self._endpoints.values()):
            await endpoint.send(message)

    async def hand_out(self, job: Frame) -> None:
        """Pass a job on as it came: its header to every rank, its payload to rank 0 alone."""
        for rank, endpoint in list(self._endpoints.items()):
            await endpoint.forward(job, with_payload=rank == 0)

    def dump_stacks(self) -> None:
        """Let every rank of this machine write its stacks to the log."""
        for pid in self.pids.values():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, DUMP_STACKS)
