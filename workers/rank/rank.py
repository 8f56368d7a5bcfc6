"""The rank process: takes jobs from the supervisor, runs them on the engine. Started by torchrun.

Three threads: this module's main loop works; one thread receives, so that a cancel or the supervisor's end is seen in
the middle of a job; one sends a heartbeat.
"""

from __future__ import annotations

import faulthandler
import logging
import os
import queue
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path

import msgspec
import torch
import torch.distributed as dist

from parallel_runtime import memory
from parallel_runtime.acceleration.compiler import watch
from parallel_runtime.engine.engine import Engine
from parallel_runtime.engine.prepared import Prepared
from parallel_runtime.errors import NotLoadedError, ParallelError
from parallel_runtime.networks.diffusers.lean_imports import leave_out_unused_packages
from parallel_runtime.requests.control import Cancelled
from parallel_runtime.requests.requests import Answer, Forward, Step

from ..client.patience import Patience
from ..hosts.handshake import introduce, keep_alive
from ..hosts.network import parse_address, read_secret, secret_path
from ..launch import FIRST, PoolSpec, take_place
from ..processes import DUMP_STACKS, die_with_parent
from ..wire.bell import listen
from ..wire.connection import Connection, ConnectionClosed, FrameError
from ..wire.frames import WITHOUT_PAYLOAD, Frame, decode_header, encode_header
from ..wire.protocol import (
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
from ..wire.shared_memory import Segment, write
from ..wire.tensors import pack, unpack_meta
from ..wire.unix_socket import connect_in
from .control import RankControl
from .laps import Laps
from .output import RankOutput
from .sharing import share, take_copy
from .world import World

HEARTBEAT_SECONDS = 1.0
CONNECT_SECONDS = 10.0
LISTEN_SECONDS = 0.02
"""So long after a step a rank looks for the next one itself. ComfyUI's own part of a step takes 5 ms."""
SLOW_SECONDS = 1.0
"""Jobs that take longer are told of in the log, with their parts."""
COMPILE_SECONDS = 900.0
"""A graph that takes longer has stalled."""

log = logging.getLogger("rank")


class Rank:
    """State of this process."""

    def __init__(self, connection: Connection, engine: Engine, output: RankOutput, one_host: bool = True):
        self.connection = connection
        self.output = output
        self.engine = engine
        self.rank = engine.rank
        self.device = engine.device
        self.inbox: queue.SimpleQueue[Frame] = queue.SimpleQueue()
        self.cancelled: int | None = None
        self.one_host = one_host
        self.arrived = 0.0  # when the last frame came
        self.segment: Segment | None = None  # this rank's view of the memory shared with the client
        self.progress = 0
        self.compiling_since: float | None = None  # the graph that is being made now, if any
        self._watches_compiler = False
        self.taken = 0  # number of the last job
        self.ended = 0.0  # when it had been answered
        self.expects_step = False  # at once, so that it is worth looking for
        self._patience = Patience()

    @property
    def world_size(self) -> int:
        """Ranks that this one is together with."""
        return self.engine.world_size

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

        def begin(*_: object) -> None:
            self.progress += 1
            self.compiling_since = time.monotonic()

        def end(*_: object) -> None:
            self.progress += 1
            self.compiling_since = None

        watch(begin, end)

    def work(self) -> None:
        """Main loop: one job at a time, each in its two phases."""
        while True:
            frame = self._next()
            if isinstance(frame.message, Abandon):
                self.engine.forget_calls()
            if not isinstance(frame.message, Job) or frame.message.number <= self.taken:
                continue  # Run or Abandon of a job that failed here in PREPARE, or one that the bell told of before
            if self.expects_step:
                self._patience.took(0, time.perf_counter() - self.ended)
            self.taken, self.expects_step = frame.message.number, False
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
                self.engine.forget_calls()
                continue
            laps.end("waited for the other ranks")
            self._run(frame, prepared, verdict.agreed)
            laps.end("ran in")
            if laps.total > SLOW_SECONDS:
                log.info("%s: %s", type(frame.message.request).__name__, laps)

    def _next(self) -> Frame:
        """What comes next. A step that follows another one at once is heard by the client's bell, before the supervisor
        hands it out."""
        frame = None
        if self.expects_step:
            pause = partial(self._patience.pause, 0)
            frame = listen(self.inbox, self._look, pause, self.ended, self.ended + LISTEN_SECONDS)
        return frame or self.inbox.get()

    def _look(self) -> Frame | None:
        """The step that the client rang for last, if it is the very next job: a rank that missed one is told of it, and
        of those that follow, by the supervisor. So all ranks run the same jobs in the same order."""
        header = self.segment.asked.look(self.taken + 1) if self.segment is not None else None
        job = decode_header(header, 0, WITHOUT_PAYLOAD) if header is not None else None
        if header is None or not isinstance(job, Job):
            return None
        self.arrived = time.perf_counter()
        return Frame(job, header, None)

    def _repeat(self, frame: Frame, step: Step) -> None:
        assert isinstance(frame.message, Job)
        self.output.job = frame.message.number
        try:
            prepared = self.engine.recall(step)
        except NotLoadedError as error:
            self.connection.send(Failed(frame.message.number, self.rank, describe(error, self.rank), unbegun=True))
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
            done = self._done(job, answer, prepared.cancelled, results if self.rank == 0 else {}, segment, stamps)
        except Exception as error:  # noqa: BLE001 - process border: reported to the supervisor, which ends the pool
            self._fail(job.number, error, traceback.format_exc())
            return
        self.progress += 1
        self.expects_step = self.one_host and isinstance(job.request, (Forward, Step))
        self.connection.send(*done)
        self.ended = time.perf_counter()

    def _done(
        self,
        job: Job,
        answer: Answer,
        cancelled: bool,
        results: Mapping[str, torch.Tensor],
        segment: Segment | None,
        stamps: Sequence[float],
    ) -> tuple[Done, list[memoryview], bool]:
        """The message, its payload, and whether that is elsewhere: in the segment, if there is one with room for it."""
        if segment is None or sum(tensor.nbytes for tensor in results.values()) > segment.answer.numel():
            specs, buffers = pack(results)
            stamps = (*stamps, time.perf_counter())
            return Done(job.number, self.rank, answer, cancelled, specs, stamps=stamps), buffers, False
        specs, _ = write(segment.answer, results)
        stamps = (*stamps, time.perf_counter())
        done = Done(job.number, self.rank, answer, cancelled, specs, bool(specs), stamps)
        if self.rank == 0 and isinstance(job.request, Step):
            segment.answered.ring(job.number, encode_header(done))  # the client need not wait for the supervisor
        return done, [], True

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
    world = World(spec, number, int(os.environ["LOCAL_RANK"]), Path(os.environ["PARALLEL_DIT_POOL"]))
    world.take_device()
    joins_later = int(os.environ[FIRST]) > 0  # the others are at work; all meet in a `Grow`
    if not joins_later:
        world.enter()
    laps.end("device and group")
    engine = make_engine(world.device, number, 1 if joins_later else spec.world_size)
    engine.meet = world.enter_larger if spec.hosts == 1 else None
    rank = Rank(connection, engine, output, spec.hosts == 1)
    laps.end("engine")
    log.info("start: %s", laps)
    threading.Thread(target=rank.receive, name="receive", daemon=True).start()
    threading.Thread(target=rank.beat, name="heartbeat", daemon=True).start()
    connection.send(Online(number, device_name(world.device)))
    rank.work()
