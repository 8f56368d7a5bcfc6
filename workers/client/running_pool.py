"""A running pool as the client holds it: one supervisor process, one socket, jobs by number."""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import queue
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import msgspec
import torch

from parallel_runtime.errors import OutOfMemoryError, ParallelError, PoolError, SegmentError
from parallel_runtime.requests.control import Cancelled
from parallel_runtime.requests.requests import Answer, Grown, Request, Step

from ..launch import PACK_ROOT, PoolSpec, log_directory, settings_of_ranks
from ..leftovers import make_folder, remove_leftovers
from ..pool_log import begin_log, last_line, tell_of_fresh_pool
from ..processes import end_tree
from ..wire.bell import listen
from ..wire.connection import Connection, ConnectionClosed, FrameError
from ..wire.frames import Frame
from ..wire.protocol import AskStatus, Cancel, Compiling, Done, Failed, Job, Loading, Progress, Shutdown, Status, revive
from ..wire.shared_memory import Scalar
from ..wire.tensors import unpack
from ..wire.transport import Transport
from .patience import Patience
from .silence import Silence

log = logging.getLogger("parallel_dit")

_CPU = torch.device("cpu")
POLL_SECONDS = 0.05
EXIT_SECONDS = 10.0
LAST_WORD_SECONDS = 1.0
KILL_SECONDS = 2.0
CANCEL_SECONDS = 1.5
"""A job that has not ended so long after its cancel is left to end by itself."""
ABANDONED_SECONDS = 30.0
"""So long a request waits for an abandoned job; then it takes a fresh pool."""
COMPILING_SECONDS = 5.0
"""A rank that compiles says so once a second."""

OnProgress = Callable[[int, int, "torch.Tensor | None"], None]
OnCompile = Callable[[], None]
"""Called about once a second by each rank that compiles, while it does."""
ShouldCancel = Callable[[], bool]
Vet = Callable[[Sequence[Scalar]], None]
"""Gets what scalars are, and raises what stops their request."""


class RunningPool:
    """Started by its constructor, which does not wait for the ranks; `wait_until_ready` does.

    Args:
        spec: devices; more where the pool has taken in others since.
        rank_module: what torchrun starts in each rank.
    """

    def __init__(self, spec: PoolSpec, rank_module: str = "workers.rank"):
        self.spec = spec
        remove_leftovers()
        logs = log_directory()
        self._folder = make_folder()
        self.settings = settings_of_ranks(os.environ)
        """What the environment told the ranks, and tells those that come."""
        self.log = logs / f"pool-{self.directory.name.rpartition('-')[2]}.log"
        self._numbers = itertools.count(1)
        self._jobs: dict[int, queue.SimpleQueue[Frame]] = {}
        self._status: Status | None = None
        self._status_changed = threading.Condition()
        self.loading: tuple[int, int] | None = None
        """Bytes of weights that are on the device, and of how many, while a job brings them."""
        self._closed = False
        self._transport = Transport()
        self._patience = Patience()
        self._sent = 0.0
        self.stamps: tuple[float, ...] = ()
        """When the last job was sent, rank 0's own stamps, when its answer came; see step_trace.py."""
        self._dying = False  # a job was told that the pool dies with it; its last status may still be on the way
        self._abandoned: dict[int, float] = {}  # cancelled jobs that go on, and since when
        self._taking = threading.Lock()
        self._compiled = 0.0
        self._given_up: PoolError | None = None
        try:
            self._supervisor, self._connection = self._start(rank_module)
        except OSError as error:
            self._folder.remove()
            raise PoolError(
                f"The pool's supervisor could not be started: {error.strerror or error}.",
                "Close other programs, or raise the limit that this names, and queue the prompt again.",
            ) from error
        self._folder.let_go()  # the supervisor holds it now
        self._silence = Silence(time.monotonic())
        self._reader = threading.Thread(target=self._receive, name="parallel-dit", daemon=True)
        self._reader.start()

    def _start(self, rank_module: str) -> tuple[subprocess.Popen[bytes], Connection]:
        ours, theirs = socket.socketpair()
        command = [sys.executable, "-m", "workers.supervisor", str(theirs.fileno()), str(os.getpid())]
        command += [str(self.directory), str(self.log), str(self.spec), rank_module]
        log = begin_log(self.log)
        with theirs, log or contextlib.nullcontext():
            try:
                supervisor = subprocess.Popen(
                    command,
                    cwd=PACK_ROOT,
                    pass_fds=[theirs.fileno(), self._folder.descriptor],
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,  # what it says where it cannot start, which no message of its own can tell
                    start_new_session=True,  # Ctrl-C in ComfyUI's terminal is for ComfyUI
                )
            except OSError:
                ours.close()
                raise
        return supervisor, Connection(ours)

    @property
    def directory(self) -> Path:
        """The pool's private folder."""
        return self._folder.path

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
                self._mind_silence()
                self._status_changed.wait(POLL_SECONDS)
        if not self.alive:
            raise self.death()

    def settle(self, should_cancel: ShouldCancel) -> None:
        """Wait until no job goes on that was cancelled, or end the pool: whoever comes next had no part in it.

        Raises:
            Cancelled: the artist did not want to wait.
        """
        while self._abandoned and self.alive:
            if should_cancel():
                raise Cancelled
            with contextlib.suppress(PoolError):
                self._mind_silence()
            now = time.monotonic()
            compiles = now - self._compiled < COMPILING_SECONDS  # which the next request would wait for as well
            if not compiles and now - min(self._abandoned.values(), default=now) > ABANDONED_SECONDS:
                self._give_up("did not end a job that was cancelled")
            time.sleep(POLL_SECONDS)

    def status(self, timeout: float = 5.0) -> Status:
        """Ask the supervisor for the pool's state; works while a job runs. `silent` where no answer comes in time.

        Raises:
            PoolError: the pool is gone.
        """
        with self._status_changed:
            before = self._status
            self._connection.offer(AskStatus())
            self._status_changed.wait_for(lambda: self._status is not before or self._closed, timeout)
            if self._closed and self._status is None:
                raise self.death()
            if self._closed or self._status is not before:
                assert self._status is not None
                return self._status
            known = before or Status("silent", {}, {}, 0, str(self.log))
            return msgspec.structs.replace(known, state="silent")

    def submit(
        self,
        request: Request,
        tensors: Mapping[str, torch.Tensor],
        on_progress: OnProgress,
        on_compile: OnCompile,
        should_cancel: ShouldCancel,
        device: torch.device = _CPU,
        scalars: Sequence[torch.Tensor] = (),
        vet: Vet = lambda scalars: None,
    ) -> tuple[Answer, dict[str, torch.Tensor]]:
        """Run one request to its end; return its answer and its tensors, on `device`.

        Args:
            scalars: tensors of one element, wherever they are.
            vet: gets their values just before the request is sent; what it raises stops that.

        Raises:
            ParallelError: what the ranks reported.
            PoolError: the pool died; the next request needs a fresh one.
            Cancelled: `should_cancel` said so. The ranks have stopped, or will; see `settle`.
        """
        answers: queue.SimpleQueue[Frame] = queue.SimpleQueue()
        parcel = self._transport.put(tensors, scalars)
        vet(parcel.scalars)
        self._mind_silence()  # which nobody else does where each answer is there at once
        job = Job(next(self._numbers), request, parcel.specs, parcel.segment)
        self._jobs[job.number] = answers
        try:
            if isinstance(request, Step):
                self._transport.ring(job)
            self._sent = time.perf_counter()
            self._send(job, should_cancel, parcel.buffers, bool(parcel.segment))
            if isinstance(request, Step):
                self._transport.expect(device)
            done, payload = self._await(job, answers, on_progress, on_compile, should_cancel)
            return done.answer, self._transport.take(done, payload, device)
        except SegmentError as error:
            self._transport.give_up(error)
        finally:
            self._leave(job.number, answers)
        return self.submit(request, tensors, on_progress, on_compile, should_cancel, device, scalars, vet)

    def _await(
        self,
        job: Job,
        answers: queue.SimpleQueue[Frame],
        on_progress: OnProgress,
        on_compile: OnCompile,
        should_cancel: ShouldCancel,
    ) -> tuple[Done, memoryview | None]:
        cancelled_at: float | None = None
        told = False
        while True:
            frame = self._hear(job, answers, listen_too=cancelled_at is None)
            if frame is None:
                if self._closed:
                    raise self.death()
                self._mind_silence()
            if cancelled_at is None and should_cancel():
                cancelled_at = time.monotonic()
            if cancelled_at is not None:
                told = told or self._connection.offer(Cancel(job.number))
            if frame is None:
                if cancelled_at is not None and time.monotonic() - cancelled_at > CANCEL_SECONDS:
                    self._abandon(job.number, answers, cancelled_at)
                    raise Cancelled
                continue
            message = frame.message
            if isinstance(message, Progress):
                on_progress(message.step, message.total, unpack(message.tensors, frame.payload).get("denoised"))
            elif isinstance(message, Compiling):
                on_compile()
            elif isinstance(message, Failed):
                raise Cancelled if message.cancelled else self._explain(message)
            elif isinstance(message, Done):
                if message.cancelled or cancelled_at is not None:
                    raise Cancelled
                heard = time.perf_counter()
                self.stamps = (self._sent, *message.stamps, heard)
                if isinstance(job.request, Step):
                    self._patience.took(job.request.kind, heard - self._sent)
                return message, frame.payload

    def _hear(self, job: Job, answers: queue.SimpleQueue[Frame], listen_too: bool) -> Frame | None:
        """What comes next of a job; None where nothing does for POLL_SECONDS.

        Args:
            listen_too: whether to look if rank 0 has rung as well. Its answer then comes once more, through the
                supervisor, when nobody waits for it.
        """
        until = time.perf_counter() + POLL_SECONDS
        request = job.request
        if not listen_too or not isinstance(request, Step):
            with contextlib.suppress(queue.Empty):
                return answers.get(timeout=POLL_SECONDS)
            return None

        def look() -> Frame | None:
            answer = self._transport.look(job.number)
            return Frame(answer, b"", None) if answer is not None else None

        return listen(answers, look, partial(self._patience.pause, request.kind), self._sent, until)

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

    def _send(
        self, message: Job, should_cancel: ShouldCancel, buffers: Sequence[memoryview] = (), elsewhere: bool = False
    ) -> None:
        started = time.monotonic()

        def while_stuck() -> None:
            self._mind_silence()
            if should_cancel() and time.monotonic() - started > CANCEL_SECONDS:
                self._give_up("did not take in a job that was cancelled")
                raise Cancelled

        try:
            self._connection.send(message, buffers, elsewhere, while_stuck)
        except ConnectionClosed as error:
            raise self.death() from error

    def _mind_silence(self) -> None:
        """To be called while anything is awaited.

        Raises:
            PoolError: the supervisor does not answer, and was ended.
        """
        now = time.monotonic()
        verdict = self._silence.tick(now)
        if verdict == "ask":
            self._connection.offer(AskStatus())
        elif verdict == "give up":
            self._give_up(f"did not answer for {self._silence.seconds:.0f} seconds")
            raise self.death()

    def _give_up(self, why: str) -> None:
        """End the supervisor, stopped or not, and with it by the kernel's hand every process of the pool."""
        self._given_up = PoolError(
            f"The pool's supervisor (process {self._supervisor.pid}) {why}.",
            tell_of_fresh_pool(self.log),
        )
        self._closed = True
        self._end_by_force()

    def _end_by_force(self) -> None:
        if self._supervisor.poll() is None:
            end_tree(self._supervisor.pid, kill_seconds=KILL_SECONDS)
        self._connection.close()
        with contextlib.suppress(subprocess.TimeoutExpired):  # one inside of a driver, or of a file system that hangs
            self._supervisor.wait(KILL_SECONDS)
        self._folder.remove()
        self._transport.close()

    def _receive(self) -> None:
        """Reader thread: hands each frame to the job it belongs to."""
        with contextlib.suppress(ConnectionClosed, FrameError):
            while True:
                frame = self._connection.receive()
                self._silence.heard(time.monotonic())
                message = frame.message
                if isinstance(message, Status):
                    with self._status_changed:
                        self._status = message
                        self._status_changed.notify_all()
                elif isinstance(message, Loading):
                    self.loading = (message.done, message.total)
                elif isinstance(message, (Progress, Compiling, Done, Failed)):
                    self.loading = None
                    if isinstance(message, Done) and isinstance(message.answer, Grown):
                        self.spec = replace(self.spec, devices=message.answer.devices)
                    self._take(message.number, frame)
        with self._status_changed:
            self._closed = True
            self._status_changed.notify_all()

    def _take(self, number: int, frame: Frame) -> None:
        message = frame.message
        if isinstance(message, Compiling):
            self._compiled = time.monotonic()
        with self._taking:
            job = self._jobs.get(number)
            if job is not None:
                job.put(frame)
            elif isinstance(message, (Done, Failed)):
                self._dying |= isinstance(message, Failed) and not message.pool_alive
                self._abandoned.pop(number, None)

    def _abandon(self, number: int, answers: queue.SimpleQueue[Frame], since: float) -> None:
        """Wait no longer for a cancelled job; the reader notes its end."""
        with self._taking:
            self._abandoned[number] = since
        self._transport.close()  # the ranks may be reading and writing it still
        self._leave(number, answers)

    def _leave(self, number: int, answers: queue.SimpleQueue[Frame]) -> None:
        """Wait no longer for a job. What comes of it from now on, or has come since the last look, the pool notes."""
        with self._taking:
            self._jobs.pop(number, None)
        while not answers.empty():
            self._take(number, answers.get())

    def death(self) -> PoolError:
        """Why the pool is gone, as an error to raise."""
        if self._given_up is not None:
            return self._given_up
        error = self._status.error if self._status is not None else None
        if error is not None:
            revived = revive(error)
            return PoolError(revived.cause, revived.fix)
        code: int | None = None
        with contextlib.suppress(subprocess.TimeoutExpired):  # its connection closes a moment before it has ended
            code = self._supervisor.wait(LAST_WORD_SECONDS)
        ended = "closed its connection" if code is None else f"ended with code {code}"
        said = last_line(self.log) if code else ""
        return PoolError(
            f"The pool's supervisor (process {self._supervisor.pid}) {ended}{said and f' and said: {said}'}.",
            tell_of_fresh_pool(self.log),
        )

    def close(self, seconds: float = EXIT_SECONDS) -> None:
        """End the pool and wait until nothing of it is left, for so many seconds; then end it by force."""
        self._connection.offer(Shutdown())
        deadline = time.monotonic() + seconds
        while self._supervisor.poll() is None and time.monotonic() < deadline:
            time.sleep(0.02)
        self._end_by_force()
