"""The rank process: takes jobs from the supervisor, runs them on the engine. Started by torchrun.

Three threads: this module's main loop works; one thread receives, so that a cancel or the supervisor's end is seen in
the middle of a job; one sends a heartbeat.
"""

from __future__ import annotations

import datetime
import faulthandler
import logging
import os
import queue
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path

import msgspec
import torch
import torch.distributed as dist

from parallel_runtime import memory
from parallel_runtime.errors import ParallelError
from parallel_runtime.loading.lean_imports import leave_out_unused_packages
from parallel_runtime.pipeline.control import Cancelled
from parallel_runtime.pipeline.engine import Engine, Prepared
from parallel_runtime.pipeline.requests import Answer, Step

from .connection import Connection, ConnectionClosed, FrameError
from .frames import Frame
from .handshake import introduce, keep_alive
from .laps import Laps
from .launch import PoolSpec, take_place
from .network import parse_address, read_secret, secret_path
from .processes import DUMP_STACKS, die_with_parent
from .protocol import (
    Abandon,
    Cancel,
    Compiling,
    Done,
    Failed,
    Heartbeat,
    Hello,
    Job,
    Online,
    Ready,
    Run,
    describe,
)
from .rank_control import RankControl
from .rank_output import RankOutput
from .shared_memory import Segment, write
from .sharing import share, take_copy
from .store import open_store
from .tensors import pack, unpack_meta
from .unix_socket import connect_in

HEARTBEAT_SECONDS = 1.0
CONNECT_SECONDS = 10.0
SLOW_SECONDS = 1.0
"""Jobs that take longer are told of in the log, with their parts."""
COMPILE_SECONDS = 900.0
"""A graph that takes longer has stalled."""
COLLECTIVE_TIMEOUT = datetime.timedelta(minutes=30)

log = logging.getLogger("rank")


class Rank:
    """State of this process."""

    def __init__(self, connection: Connection, engine: Engine, output: RankOutput, one_host: bool = True):
        self.connection = connection
        self.output = output
        self.engine = engine
        self.rank = engine.rank
        self.world_size = engine.world_size
        self.device = engine.device
        self.inbox: queue.SimpleQueue[Frame] = queue.SimpleQueue()
        self.cancelled: int | None = None
        self.one_host = one_host
        self.arrived = 0.0  # when the last frame came
        self.segment: Segment | None = None  # this rank's view of the memory shared with the client
        self.progress = 0
        self.compiling_since: float | None = None  # the graph that is being made now, if any
        self._watches_compiler = False

    def receive(self) -> None:
        """Receiver thread. The supervisor's end is this process's end, in the middle of whatever it does."""
        try:
            while True:
                frame = self.connection.receive()
                if isinstance(frame.message, Cancel):
                    self.cancelled = frame.message.number
                else:
                    self.arrived = time.perf_counter()
                    self.inbox.put(frame)
        except (ConnectionClosed, FrameError) as error:
            log.info("the supervisor is gone (%s)", error)
            os._exit(0)

    def beat(self) -> None:
        """Heartbeat thread."""
        while True:
            threading.Event().wait(HEARTBEAT_SECONDS)
            try:
                self.connection.send(Heartbeat(self.rank, self._got_on(), in_collective()))
                since, job = self.compiling_since, self.output.job
                if since is not None and job is not None and time.monotonic() - since < COMPILE_SECONDS:
                    self.connection.send(Compiling(job, self.rank))
            except ConnectionClosed:
                return

    def _got_on(self) -> int:
        """Rises whenever this rank gets on: with a job, with a forward's blocks, or with an import, which may take a
        minute from a cold disk."""
        return self.progress + self.engine.residency.pulse.count + len(sys.modules)

    def watch_compiler(self) -> None:
        """Before this process compiles: that takes minutes without a step, so the heartbeat tells of it, and each graph
        counts as progress. Not before, as the compiler takes seconds to import."""
        if self._watches_compiler:
            return
        self._watches_compiler = True
        import torch._dynamo.callback

        def begin(*_: object) -> None:
            self.progress += 1
            self.compiling_since = time.monotonic()

        def end(*_: object) -> None:
            self.progress += 1
            self.compiling_since = None

        torch._dynamo.callback.callback_handler.register_start_callback(begin)
        torch._dynamo.callback.callback_handler.register_end_callback(end)

    def work(self) -> None:
        """Main loop: one job at a time, each in its two phases."""
        while True:
            frame = self.inbox.get()
            if not isinstance(frame.message, Job):
                continue  # Run or Abandon of a job that failed here in PREPARE
            if isinstance(frame.message.request, Step):
                self._repeat(frame, frame.message.request)
                continue
            laps = Laps()
            prepared = self._prepare(frame.message)
            if prepared is None:
                continue
            laps.end("prepared in")
            verdict = self._verdict(frame.message.number)
            if isinstance(verdict, Abandon):
                prepared.abandon()
                continue
            laps.end("waited for the other ranks")
            self._run(frame, prepared, verdict.agreed)
            laps.end("ran in")
            if laps.total > SLOW_SECONDS:
                log.info("%s: %s", type(frame.message.request).__name__, laps)

    def _repeat(self, frame: Frame, step: Step) -> None:
        assert isinstance(frame.message, Job)
        self.output.job = frame.message.number
        try:
            prepared = self.engine.recall(step)
        except ParallelError as error:
            self._fail(frame.message.number, error, "")
            return
        self._run(frame, prepared, {})

    def _verdict(self, number: int) -> Run | Abandon:
        while True:
            message = self.inbox.get().message
            if isinstance(message, (Run, Abandon)) and message.number == number:
                return message

    def _prepare(self, job: Job) -> Prepared | None:
        self.output.job = job.number
        try:
            if self._shares(job):
                self._map(job.segment)  # what cannot be opened is found here, where it costs the job alone
            prepared = self.engine.prepare(job.request, unpack_meta(job.tensors), RankControl(self, job.number))
        except Cancelled:
            self._fail(job.number, Cancelled(), "", cancelled=True)
        except Exception as error:  # noqa: BLE001 - process border: reported to the supervisor, the pool lives
            self._fail(job.number, error, traceback.format_exc())
        else:
            self.connection.send(Ready(job.number, self.rank, dict(prepared.offers)))
            return prepared
        return None

    def _run(self, frame: Frame, prepared: Prepared, agreed: Mapping[str, int]) -> None:
        job = frame.message
        assert isinstance(job, Job)
        try:
            stamps = [self.arrived, time.perf_counter()]
            # Opened in PREPARE: the client may have let go of it since, where it did not wait for a cancelled job.
            segment = self.segment if self._shares(job) else None
            payload = frame.payload if segment is None else segment.request
            if segment is not None and self.one_host:
                # Every rank copies for itself: nothing to wait for. A rank outside of a step's plan may copy what is
                # written already for the next one; it uses none of it. All other jobs are answered when all are done.
                tensors, copied = take_copy(job.tensors, segment.request, self.device)
            else:
                tensors, copied = share(job.tensors, payload, self.device, self.world_size), None
            control = RankControl(self, job.number)
            stamps.append(time.perf_counter())
            answer, results = prepared.run(tensors, control, agreed)
            stamps.append(time.perf_counter())
            if not prepared.cancelled:
                control.finish()
            if copied is not None:
                copied.synchronize()
            done = self._done(job.number, answer, prepared.cancelled, results if self.rank == 0 else {}, segment)
        except Exception as error:  # noqa: BLE001 - process border: reported to the supervisor, which ends the pool
            self._fail(job.number, error, traceback.format_exc())
            return
        self.progress += 1
        message, buffers, elsewhere = done
        stamps.append(time.perf_counter())
        self.connection.send(msgspec.structs.replace(message, stamps=tuple(stamps)), buffers, elsewhere)

    def _done(
        self, number: int, answer: Answer, cancelled: bool, results: Mapping[str, torch.Tensor], segment: Segment | None
    ) -> tuple[Done, list[memoryview], bool]:
        """The message, its payload, and whether that is elsewhere: in the segment, if there is one with room for it."""
        if segment is None or sum(tensor.nbytes for tensor in results.values()) > segment.answer.numel():
            specs, buffers = pack(results)
            return Done(number, self.rank, answer, cancelled, specs), buffers, False
        specs, _ = write(segment.answer, results)
        return Done(number, self.rank, answer, cancelled, specs, in_segment=bool(specs)), [], True

    def _shares(self, job: Job) -> bool:
        """Whether this rank takes the job's tensors out of shared memory, the same for all of a kind of pool."""
        return bool(job.segment) and (self.one_host or self.rank == 0)

    def _map(self, path: str) -> None:
        """Open the client's segment. It makes another one where a job needs more room; a step needs none."""
        if self.segment is None or not self.segment.is_at(path):
            if self.segment is not None:
                self.segment.close()
                self.segment = None
            self.segment = Segment.open(path)

    def _fail(self, number: int, error: Exception, trace: str, cancelled: bool = False) -> None:
        if memory.is_out_of_memory(error):
            self.engine.free()
            error = memory.explain_out_of_memory(error, self.device, self.rank)
        if not isinstance(error, ParallelError):
            log.error("job %d: %s", number, trace)
        info = describe(error, self.rank, trace)
        if is_lost_peer(error):
            info = msgspec.structs.replace(info, consequence=True)
        self.connection.send(Failed(number, self.rank, info, cancelled))


def in_collective() -> bool:
    """Whether the main thread is inside of a call of torch.distributed."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    return frame is not None and frame.f_code.co_filename.startswith(os.path.dirname(dist.__file__))


def is_lost_peer(error: Exception) -> bool:
    """A collective failed because its other side is gone. gloo says so in a plain RuntimeError."""
    return isinstance(error, dist.DistError) or (isinstance(error, RuntimeError) and "gloo" in str(error))


def connect(environment: Mapping[str, str]) -> Connection:
    """Connect back to the supervisor: over its Unix socket, or from another host with the shared secret."""
    main = environment.get("PARALLEL_DIT_MAIN")
    if main is None:
        return Connection(connect_in(Path(environment["PARALLEL_DIT_POOL"])))
    sock = socket.create_connection(parse_address(main), timeout=CONNECT_SECONDS)
    introduce(sock, read_secret(secret_path(environment)), main)
    keep_alive(sock)
    return Connection(sock)


def join_group(spec: PoolSpec, environment: Mapping[str, str]) -> torch.device:
    """Take this rank's device and join the process group. One rank alone needs no group."""
    rank, local_rank = int(environment["RANK"]), int(environment["LOCAL_RANK"])
    device = torch.device("cpu") if spec.device_type == "cpu" else torch.device("cuda", spec.devices[local_rank])
    if device.type == "cuda":
        torch.cuda.set_device(device)
        torch.zeros(1, device=device)  # the context exists before DeviceMesh looks, which would choose a device itself
    if spec.world_size > 1:
        dist.init_process_group(
            backend="cpu:gloo" if device.type == "cpu" else "cpu:gloo,cuda:nccl",
            timeout=COLLECTIVE_TIMEOUT,
            store=open_store(spec, Path(environment["PARALLEL_DIT_POOL"]), rank),
            rank=rank,
            world_size=spec.world_size,
        )
    return device


def device_name(device: torch.device) -> str:
    """What the status shows for a rank."""
    return f"cuda:{device.index} {torch.cuda.get_device_name(device)}" if device.type == "cuda" else "cpu"


def main(make_engine: Callable[[torch.device, int, int], Engine] = Engine) -> None:
    """Process entry, under torchrun. `make_engine(device, rank, world_size)` lets tests put faults in."""
    die_with_parent(os.getppid())
    leave_out_unused_packages()
    spec = PoolSpec.parse(os.environ["PARALLEL_DIT_DEVICES"])
    number = take_place(spec, os.environ)
    output = RankOutput.install(number)
    logging.basicConfig(stream=sys.stderr, level=logging.INFO, format="%(name)s: %(message)s")
    laps = Laps.of_process()
    laps.end("Python and imports")
    faulthandler.enable()
    faulthandler.register(DUMP_STACKS, all_threads=True)
    connection = connect(os.environ)
    connection.send(Hello(number, os.getpid()))
    torch.set_grad_enabled(False)
    laps.end("connection")
    device = join_group(spec, os.environ)
    laps.end("device and group")
    rank = Rank(connection, make_engine(device, number, spec.world_size), output, spec.hosts == 1)
    laps.end("engine")
    log.info("start: %s", laps)
    threading.Thread(target=rank.receive, name="receive", daemon=True).start()
    threading.Thread(target=rank.beat, name="heartbeat", daemon=True).start()
    connection.send(Online(number, device_name(device)))
    rank.work()


if __name__ == "__main__":
    main()
