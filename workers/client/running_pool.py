"""A running pool as the client holds it: jobs go out and answers come in, over the supervisor's socket."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Sequence
from pathlib import Path

from parallel_runtime.errors import PoolError, SegmentError
from parallel_runtime.requests.control import Cancelled
from parallel_runtime.said import said

from ..launch import PoolSpec
from ..wire.connection import ConnectionClosed, FrameError
from ..wire.protocol import Cancel, Compiling, Done, Failed, Job, Loading, Measuring, Progress, Shutdown, Status
from ..wire.tensors import unpack
from ..wire.transport import Transport
from .failures import explain
from .open_jobs import OpenJob, OpenJobs
from .pool_state import POLL_SECONDS, PoolState
from .submission import Callbacks, Reply, ShouldCancel, Submission
from .supervisor_process import SupervisorProcess
from .waiting import Wait

EXIT_SECONDS = 10.0
CANCEL_SECONDS = 1.5
"""A job that has not ended so long after its cancel is left to end by itself."""
ABANDONED_SECONDS = 30.0
"""So long a request waits for an abandoned job; then it takes a fresh pool."""


class RunningPool:
    """Started by its constructor, which does not wait for the ranks; `wait_until_ready` does.

    Args:
        spec: devices.
        rank_module: what torchrun starts in each rank.
    """

    def __init__(self, spec: PoolSpec, rank_module: str = "workers.rank"):
        self.spec = spec
        self._wait = Wait()
        self._transport = Transport()
        self._jobs = OpenJobs()
        self._supervisor = SupervisorProcess(spec, rank_module)
        self._connection = self._supervisor.connection
        self._state = PoolState(self._supervisor, self._transport.close)
        self._reader = threading.Thread(target=self._receive, name="parallel-dit", daemon=True)
        self._reader.start()

    @property
    def directory(self) -> Path:
        """The pool's private folder."""
        return self._supervisor.directory

    @property
    def log(self) -> Path:
        """The pool's log."""
        return self._supervisor.log

    @property
    def pid(self) -> int:
        """Of the supervisor, which all other processes of the pool are below."""
        return self._supervisor.pid

    @property
    def alive(self) -> bool:
        """The pool can take a job, now or when it has started."""
        return not (self._jobs.pool_dies or self._state.dead)

    @property
    def settled(self) -> bool:
        """No job goes on that was cancelled."""
        return not self._jobs.abandoned

    @property
    def waits_for(self) -> Wait:
        """What a request that was sent to it, or wants to be, is waiting for."""
        if self._state.starting:
            return Wait("start", self._state.arrivals, self.spec.world_size)
        return self._wait if self.settled else Wait("cancelled")

    def wait_until_ready(self, should_cancel: ShouldCancel) -> None:
        """Wait until every rank is online.

        Raises:
            PoolError: the pool could not start.
            Cancelled: the artist did not want to wait; the pool goes on starting.
        """
        self._state.wait_until_started(should_cancel)
        if not self.alive:
            raise self.death()

    def settle(self, should_cancel: ShouldCancel) -> None:
        """Wait until no job goes on that was cancelled, or end the pool: whoever comes next had no part in it.

        Raises:
            Cancelled: the artist did not want to wait.
        """
        while self.alive and not self.settled:
            if should_cancel():
                raise Cancelled
            with contextlib.suppress(PoolError):
                self._state.mind_silence()
            now = time.monotonic()
            since = min(self._jobs.abandoned.values(), default=now)
            # One that compiles does what the next request would wait for as well.
            if not self._jobs.compiles() and now - since > ABANDONED_SECONDS:
                self._state.give_up(said("did not end a job that was cancelled"))
            time.sleep(POLL_SECONDS)

    def status(self, timeout: float = 5.0) -> Status:
        """Ask the supervisor for the pool's state; works while a job runs. `silent` where no answer comes in time.

        Raises:
            PoolError: the pool is gone.
        """
        return self._state.ask(timeout)

    def submit(self, submission: Submission) -> Reply:
        """Run one request to its end.

        Raises:
            ParallelError: what the ranks reported.
            PoolError: the pool died; the next request needs a fresh one.
            Cancelled: `should_cancel` said so. The ranks have stopped, or will; see `settle`.
        """
        parcel = self._transport.put(submission.tensors)
        open_job = self._jobs.open()
        job = Job(open_job.number, submission.request, parcel.specs, parcel.segment)
        try:
            self._send(job, submission.callbacks.should_cancel, parcel.buffers, bool(parcel.segment))
            done, payload = self._await(open_job, submission.callbacks)
            return Reply(done.answer, self._transport.take(done, payload, submission.device), done.finite)
        except SegmentError as error:
            self._transport.give_up(error)
        finally:
            self._jobs.leave(open_job)
        return self.submit(submission)

    def _await(self, job: OpenJob, callbacks: Callbacks) -> tuple[Done, memoryview | None]:
        """A job's end, and the payload that came with it."""
        cancelled_at: float | None = None
        told = False
        while True:
            frame = job.hear(POLL_SECONDS)
            if frame is None:
                if self._state.closed:
                    raise self.death()
                self._state.mind_silence()
            if cancelled_at is None and callbacks.should_cancel():
                cancelled_at = time.monotonic()
            if cancelled_at is not None:
                told = told or self._connection.offer(Cancel(job.number))
            if frame is None:
                if cancelled_at is not None and time.monotonic() - cancelled_at > CANCEL_SECONDS:
                    self._transport.close()  # the ranks may be reading and writing it still
                    self._jobs.abandon(job, cancelled_at)
                    raise Cancelled
                continue
            message = frame.message
            if isinstance(message, Progress):
                denoised = unpack(message.tensors, frame.payload).get("denoised")
                callbacks.on_progress(message.step, message.total, denoised)
            elif isinstance(message, Compiling):
                callbacks.on_compile()
            elif isinstance(message, Failed):
                if message.cancelled:
                    raise Cancelled
                self._jobs.note_failure(message)
                raise explain(message, self.spec)
            elif isinstance(message, Done):
                if message.cancelled or cancelled_at is not None:
                    raise Cancelled
                return message, frame.payload

    def _send(
        self, message: Job, should_cancel: ShouldCancel, buffers: Sequence[memoryview] = (), elsewhere: bool = False
    ) -> None:
        started = time.monotonic()

        def while_stuck() -> None:
            self._state.mind_silence()
            if should_cancel() and time.monotonic() - started > CANCEL_SECONDS:
                self._state.give_up(said("did not take in a job that was cancelled"))
                raise Cancelled

        try:
            self._connection.send(message, buffers, elsewhere, while_stuck)
        except ConnectionClosed as error:
            raise self.death() from error

    def _receive(self) -> None:
        """Reader thread: hands each frame to the job it belongs to."""
        with contextlib.suppress(ConnectionClosed, FrameError):
            while True:
                frame = self._connection.receive()
                self._state.heard()
                message = frame.message
                if isinstance(message, Status):
                    self._state.note(message)
                elif isinstance(message, Loading):
                    self._wait = Wait("weights", message.done, message.total)
                elif isinstance(message, Measuring):
                    self._wait = Wait("measuring")
                elif isinstance(message, (Progress, Compiling, Done, Failed)):
                    self._wait = Wait()
                    self._jobs.take(message.number, frame)
        self._state.close()

    def death(self) -> PoolError:
        """Why the pool is gone, as an error to raise."""
        return self._state.death()

    def interrupt(self) -> None:
        """Ask it to end, and end it by force where it does not; a job's caller is told that it was restarted."""
        self._state.told_to_end()
        self._connection.offer(Shutdown())
        self._supervisor.wait(EXIT_SECONDS)
        self._supervisor.end_by_force()

    def close(self, seconds: float = EXIT_SECONDS) -> None:
        """End the pool and wait until nothing of it is left, for so many seconds; then end it by force."""
        self._connection.offer(Shutdown())
        self._supervisor.wait(seconds)
        self._supervisor.end_by_force()
        self._transport.close()
