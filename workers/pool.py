"""A running pool as the client holds it: one supervisor process, one socket, jobs by number."""

from __future__ import annotations

import contextlib
import itertools
import logging
import queue
import shutil
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping

import torch

from parallel_runtime.errors import OutOfMemoryError, ParallelError, PoolError
from parallel_runtime.pipeline.control import Cancelled
from parallel_runtime.pipeline.requests import Answer, Request

from .connection import Connection, ConnectionClosed, FrameError
from .frames import Frame, tensor_bytes
from .launch import PACK_ROOT, PoolSpec, log_directory
from .leftovers import make_directory, remove_leftovers
from .protocol import AskStatus, Cancel, Compiling, Done, Failed, Job, Progress, Shutdown, Status, revive
from .shared_memory import Segment, SegmentError, half_for, read, write
from .tensors import pack, unpack

log = logging.getLogger("parallel_dit")

_CPU = torch.device("cpu")
POLL_SECONDS = 0.05
EXIT_SECONDS = 10.0

OnProgress = Callable[[int, int, "torch.Tensor | None"], None]
OnCompile = Callable[[], None]
"""Called about once a second by each rank that compiles, while it does."""
ShouldCancel = Callable[[], bool]


class RunningPool:
    """Started by its constructor, which does not wait for the ranks; `wait_until_ready` does.

    Args:
        spec: devices.
        rank_module: what torchrun starts in each rank.
    """

    def __init__(self, spec: PoolSpec, rank_module: str = "workers.rank"):
        self.spec = spec
        remove_leftovers()
        self.directory = make_directory()
        self.log = log_directory() / f"pool-{self.directory.name.rpartition('-')[2]}.log"
        self._numbers = itertools.count(1)
        self._jobs: dict[int, queue.SimpleQueue[Frame | None]] = {}
        self._status: Status | None = None
        self._status_changed = threading.Condition()
        self._closed = False
        self._segment: Segment | None = None  # of the job at hand; jobs come one at a time
        self._shares_memory = True
        self._taken: torch.cuda.Event | None = None
        self._sent = 0.0
        self.stamps: tuple[float, ...] = ()
        """When the last job was sent, rank 0's own stamps, when its answer came; see step_trace.py."""
        self._dying = False  # a job was told that the pool dies with it; its last status may still be on the way
        ours, theirs = socket.socketpair()
        with theirs:
            self._supervisor = subprocess.Popen(
                [
                    sys.executable,
                    "-m",
                    "workers.supervisor",
                    str(theirs.fileno()),
                    str(self.directory),
                    str(self.log),
                    str(spec),
                    rank_module,
                ],
                cwd=PACK_ROOT,
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                start_new_session=True,  # Ctrl-C in ComfyUI's terminal is for ComfyUI; the pool ends with its socket
            )
        self._connection = Connection(ours)
        self._reader = threading.Thread(target=self._receive, name="parallel-dit", daemon=True)
        self._reader.start()

    @property
    def alive(self) -> bool:
        """The pool can take a job, now or when it has started."""
        return not (self._closed or self._dying or (self._status is not None and self._status.state == "dead"))

    def wait_until_ready(self, should_cancel: ShouldCancel) -> None:
        """Wait until every rank is online.

        Raises:
            PoolError: the pool could not start.
            Cancelled: the artist did not want to wait; the pool goes on starting.
        """
        with self._status_changed:
            while self._status is None or self._status.state == "starting":
                if self._closed:
                    break
                if should_cancel():
                    raise Cancelled
                self._status_changed.wait(POLL_SECONDS)
        if not self.alive:
            raise self.death()

    def status(self, timeout: float = 5.0) -> Status:
        """Ask the supervisor for the pool's state; works while a job runs.

        Raises:
            PoolError: the pool is gone.
        """
        with self._status_changed:
            before = self._status
            self._send(AskStatus())
            self._status_changed.wait_for(lambda: self._status is not before or self._closed, timeout)
            if self._status is None:
                raise self.death()
            return self._status

    def submit(
        self,
        request: Request,
        tensors: Mapping[str, torch.Tensor],
        on_progress: OnProgress,
        on_compile: OnCompile,
        should_cancel: ShouldCancel,
        device: torch.device = _CPU,
    ) -> tuple[Answer, dict[str, torch.Tensor]]:
        """Run one request to its end; return its answer and its tensors, on `device`.

        Raises:
            ParallelError: what the ranks reported.
            PoolError: the pool died; the next request needs a fresh one.
            Cancelled: `should_cancel` said so, and the ranks have stopped.
        """
        number = next(self._numbers)
        answers: queue.SimpleQueue[Frame | None] = queue.SimpleQueue()
        self._jobs[number] = answers
        try:
            self._send_job(number, request, tensors)
            done, payload = self._await(number, answers, on_progress, on_compile, should_cancel)
            return done.answer, self._take(done, payload, device)
        finally:
            del self._jobs[number]

    def _send_job(self, number: int, request: Request, tensors: Mapping[str, torch.Tensor]) -> None:
        """Through the shared segment, or over the socket where there is none."""
        if self._taken is not None:  # the last answer may still be on its way to the GPU
            self._taken.synchronize()
            self._taken = None
        segment = self._segment_for(sum(tensor.nbytes for tensor in tensors.values()))
        if segment is None:
            specs, buffers = pack(tensors)
            self._send(Job(number, request, specs), buffers)
        else:
            specs = write(segment.request, tensors)
            self._send(Job(number, request, specs, segment.path), elsewhere=True)
        self._sent = time.perf_counter()

    def _segment_for(self, size: int) -> Segment | None:
        if self._segment is not None and self._segment.request.numel() >= size:
            return self._segment
        if not self._shares_memory:
            return None
        if self._segment is not None:
            self._segment.close()
        try:
            self._segment = Segment.create(half_for(size))
        except SegmentError as error:
            log.info("Parallel DiT: tensors go through a socket, as no memory can be shared: %s", error)
            self._segment, self._shares_memory = None, False
        return self._segment

    def _take(self, done: Done, payload: memoryview | None, device: torch.device) -> dict[str, torch.Tensor]:
        if not done.in_segment:
            return {name: tensor.to(device) for name, tensor in unpack(done.tensors, payload).items()}
        assert self._segment is not None
        size = sum(tensor_bytes(spec) for spec in done.tensors)
        taken, self._taken = read(self._segment.answer[:size], device)
        return unpack(done.tensors, taken)

    def _await(
        self,
        number: int,
        answers: queue.SimpleQueue[Frame | None],
        on_progress: OnProgress,
        on_compile: OnCompile,
        should_cancel: ShouldCancel,
    ) -> tuple[Done, memoryview | None]:
        asked_to_cancel = False
        while True:
            try:
                frame = answers.get(timeout=POLL_SECONDS)
            except queue.Empty:
                if self._closed:
                    raise self.death() from None
                frame = None
            if not asked_to_cancel and should_cancel():
                asked_to_cancel = True
                self._send(Cancel(number))
            if frame is None:
                continue
            message = frame.message
            if isinstance(message, Progress):
                on_progress(message.step, message.total, unpack(message.tensors, frame.payload).get("denoised"))
            elif isinstance(message, Compiling):
                on_compile()
            elif isinstance(message, Failed):
                raise Cancelled if message.cancelled else self._explain(message)
            elif isinstance(message, Done):
                if message.cancelled or asked_to_cancel:
                    raise Cancelled
                self.stamps = (self._sent, *message.stamps, time.perf_counter())
                return message, frame.payload

    def _explain(self, failed: Failed) -> ParallelError:
        error = revive(failed.error)
        self._dying |= not failed.pool_alive
        if failed.error.traceback and isinstance(error, PoolError):
            log.error("Parallel DiT, rank %d:\n%s", failed.rank, failed.error.traceback)
        if isinstance(error, OutOfMemoryError) and failed.fits:
            devices = ",".join(str(self.spec.devices[rank]) for rank in failed.fits)
            smaller = devices if self.spec.device_type == "cuda" else f"cpu:{len(failed.fits)}"
            return OutOfMemoryError(error.cause, f"It fits on the others: set devices to {smaller} in Parallel Config.")
        return error

    def _send(self, message, buffers=(), elsewhere=False) -> None:
        try:
            self._connection.send(message, buffers, elsewhere)
        except ConnectionClosed as error:
            raise self.death() from error

    def _receive(self) -> None:
        """Reader thread: hands each frame to the job it belongs to."""
        with contextlib.suppress(ConnectionClosed, FrameError):
            while True:
                frame = self._connection.receive()
                message = frame.message
                if isinstance(message, Status):
                    with self._status_changed:
                        self._status = message
                        self._status_changed.notify_all()
                elif isinstance(message, (Progress, Compiling, Done, Failed)):
                    job = self._jobs.get(message.number)
                    if job is not None:
                        job.put(frame)
        with self._status_changed:
            self._closed = True
            self._status_changed.notify_all()

    def death(self) -> PoolError:
        """Why the pool is gone, as an error to raise."""
        error = self._status.error if self._status is not None else None
        if error is not None:
            revived = revive(error)
            return PoolError(revived.cause, revived.fix)
        code = self._supervisor.poll()
        ended = "closed its connection" if code is None else f"ended with code {code}"
        return PoolError(
            f"The pool's supervisor (process {self._supervisor.pid}) {ended}.",
            f"The next prompt starts a fresh pool; the log is {self.log}.",
        )

    def close(self) -> None:
        """End the pool and wait until nothing of it is left."""
        with contextlib.suppress(ConnectionClosed):
            self._connection.send(Shutdown())
        deadline = time.monotonic() + EXIT_SECONDS
        while self._supervisor.poll() is None and time.monotonic() < deadline:
            time.sleep(0.02)
        self._connection.close()
        if self._segment is not None:
            self._segment.close()
            self._segment = None
        if self._supervisor.poll() is None:
            self._supervisor.kill()
            self._supervisor.wait()
        shutil.rmtree(self.directory, ignore_errors=True)
