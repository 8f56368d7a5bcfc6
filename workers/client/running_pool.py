"""A running pool as the client holds it: jobs go out and answers come in, over the supervisor's socket."""

from __future__ import annotations

import contextlib
import logging
import queue
import threading
import time
from collections.abc import Sequence

import msgspec

from parallel_runtime.errors import OutOfMemoryError, ParallelError, PoolError, PoolLostError, SegmentError
from parallel_runtime.requests.control import Cancelled
from parallel_runtime.said import Said, said

from ..launch import PoolSpec
from ..wire.connection import ConnectionClosed
from ..wire.frames import FrameError
from ..wire.protocol import AskStatus, Cancel, Done, Failed, Job, Progress, Shutdown, Status, revive
from ..wire.tensors import Transport, unpack
from .life import GIVE_UP_SECONDS, Life, OpenJob, Silence, State
from .node_requests import OnProgress, Reply, ShouldCancel, Submission, never
from .supervisor_process import RANKS, SupervisorProcess, take_early

EXIT_SECONDS = 10.0
POLL_SECONDS = 0.05
CANCEL_SECONDS = 1.5  # a job that has not ended so long after its cancel is left to end by itself
ABANDONED_SECONDS = 30.0  # so long a request waits for an abandoned job; then it takes a fresh pool

log = logging.getLogger("parallel_dit")


class RunningPool:
    """Started by its constructor, which does not wait for the ranks; `wait_until_ready` does."""

    def __init__(self, spec: PoolSpec, rank_module: str = RANKS, should_cancel: ShouldCancel = never):
        self.spec = spec
        self.life = Life(spec.world_size)
        self._should_cancel = should_cancel
        self._silence = Silence(time.monotonic())
        self._transport = Transport()
        early = take_early(spec if rank_module == RANKS else None)
        self._supervisor = supervisor = early or SupervisorProcess(spec, rank_module)
        self._connection = supervisor.connection
        self.directory, self.log, self.pid = supervisor.directory, supervisor.log, supervisor.pid
        """Its private folder, its log, and the supervisor, which all other processes of the pool are below."""
        threading.Thread(target=self._receive, name="parallel-dit", daemon=True).start()

    def wait_until_ready(self) -> None:
        """Wait until every rank is online; PoolError where they do not come. A cancel leaves the pool starting."""
        self._wait_while("starting")
        if not self.life.alive:
            raise self.death()

    def settle(self) -> None:
        """Wait until no job goes on that was cancelled, or end the pool: whoever comes next had no part in it."""
        with contextlib.suppress(PoolError):
            self._wait_while("cancelled")

    def _wait_while(self, state: State) -> None:
        """PoolError where the supervisor does not answer meanwhile."""
        while self.life.state == state:
            if self._should_cancel():
                raise Cancelled
            self._mind_silence()
            if state == "cancelled" and self.life.cancelled_for > ABANDONED_SECONDS:
                self._give_up(said("did not end a job that was cancelled"))
            with self.life.changed:
                self.life.changed.wait_for(lambda: self.life.state != state, POLL_SECONDS)

    def status(self, timeout: float = 5.0) -> Status:
        """Ask the supervisor for the pool's state; works while a job runs. `silent` where no answer comes in time."""
        life = self.life
        with life.changed:
            before = life.status
            self._connection.offer(AskStatus())
            heard = life.changed.wait_for(lambda: life.status is not before or life.state == "gone", timeout)
            if heard and life.status is None:
                raise self.death()
            known = life.status or Status("silent", {}, {})
            return known if heard else msgspec.structs.replace(known, state="silent")

    def submit(self, submission: Submission) -> Reply:
        """Run one request to its end; errors as of `begin` and `finish`."""
        return self.finish(self.begin(submission), submission)

    def begin(self, submission: Submission) -> OpenJob:
        """Send a request, whose end is to be waited for, or left, before the next one. FrameError: it is too large;
        PoolError where the pool died, Cancelled."""
        specs, buffers, segment = self._transport.put(submission.tensors, submission.answer_bytes)
        job = self.life.begin()
        try:
            self._send(Job(job.number, submission.request, specs, segment), buffers)
        except BaseException as error:
            if isinstance(error, FrameError):
                job.goes_on = False  # it was not sent
            self.leave(job)
            raise
        return job

    def finish(self, job: OpenJob, submission: Submission) -> Reply:
        """Wait for a request's end: what the ranks report is raised, PoolError where the pool died, Cancelled."""
        try:
            done, payload = self._await(job, submission.on_progress)
            tensors = self._transport.take(done, payload, submission.device, submission.into)
            return Reply(done.answer, tensors, done.finite)
        except SegmentError as error:
            self._transport.give_up(error)
        finally:
            self.leave(job)
        return self.submit(submission)

    def leave(self, job: OpenJob) -> None:
        """Wait no longer for a job; one that goes on is told to end, see `settle`."""
        if self.life.end(job):  # a cancel took too long, or who listens has raised something
            self._connection.offer(Cancel(job.number))
            self._transport.close()  # the ranks may be reading and writing it still

    def _await(self, job: OpenJob, on_progress: OnProgress) -> tuple[Done, memoryview | None]:
        """A job's end, and the payload that came with it."""
        cancelled_at: float | None = None
        told = False
        while True:
            frame = None
            with contextlib.suppress(queue.Empty):
                frame = job.frames.get(timeout=POLL_SECONDS)
            if cancelled_at is None and self._should_cancel():
                cancelled_at = time.monotonic()
            if cancelled_at is not None:
                told = told or self._connection.offer(Cancel(job.number))
            if frame is None:
                if self.life.state == "gone" and job.frames.empty():
                    raise self.death()
                self._mind_silence()
                if cancelled_at is not None and time.monotonic() - cancelled_at > CANCEL_SECONDS:
                    raise Cancelled
                continue
            message = frame.message
            if isinstance(message, Progress):
                denoised = unpack(message.tensors, frame.payload).get("denoised")
                on_progress(message.step, message.total, denoised)
            elif isinstance(message, Failed):
                raise Cancelled if message.cancelled else explain(message, self.spec)
            elif isinstance(message, Done):
                if message.cancelled or cancelled_at is not None:
                    raise Cancelled
                return message, frame.payload

    def _send(self, message: Job, buffers: Sequence[memoryview]) -> None:
        started = time.monotonic()

        def while_stuck() -> None:
            self._mind_silence()
            if self._should_cancel() and time.monotonic() - started > CANCEL_SECONDS:
                self._give_up(said("did not take in a job that was cancelled"))
                raise Cancelled

        try:
            self._connection.send(message, buffers, while_stuck)
        except ConnectionClosed as error:
            raise self.death() from error

    def _receive(self) -> None:
        """Reader thread."""
        with contextlib.suppress(ConnectionClosed, FrameError):
            while True:
                frame = self._connection.receive()
                self._silence.heard(time.monotonic())
                self.life.take(frame)
        self.life.close()

    def _mind_silence(self) -> None:
        """Called while anything is awaited; PoolError where the supervisor does not answer, and was ended."""
        verdict = self._silence.tick(time.monotonic())
        if verdict == "ask":
            self._connection.offer(AskStatus())
        elif verdict == "give up":
            self._give_up(said("did not answer for {seconds} seconds", seconds=f"{GIVE_UP_SECONDS:.0f}"))
            raise self.death()

    def _give_up(self, why: Said) -> None:
        """End the supervisor, stopped or not, and with it the pool."""
        self.life.die(self._supervisor.error(why))
        self._supervisor.end_by_force()
        self.life.close()
        self._transport.close()

    def death(self) -> PoolError:
        """Why the pool is gone, as an error to raise."""
        return self.life.error or self._supervisor.last_words()

    def interrupt(self) -> None:
        """Ask it to end, and end it by force where it does not; a job's caller is told that it was restarted."""
        self.life.die(PoolError("The workers were restarted while they worked for this.", "Queue the prompt again."))
        self._end(EXIT_SECONDS)

    def close(self, seconds: float = EXIT_SECONDS) -> None:
        """End the pool and wait until nothing of it is left, for so many seconds; then end it by force."""
        self._end(seconds)
        self._transport.close()

    def _end(self, seconds: float) -> None:
        self._connection.offer(Shutdown())
        self._supervisor.wait(seconds)
        self._supervisor.end_by_force()


def explain(failed: Failed, spec: PoolSpec) -> ParallelError:
    """A job's failure, for who asked for it. Where memory ran out, it names devices of the pool on which it did not."""
    error = revive(failed.error)
    if failed.unbegun and not failed.pool_alive:
        return PoolLostError(error.cause, error.fix)
    if failed.error.traceback and isinstance(error, PoolError):
        log.error("Parallel DiT, rank %d:\n%s", failed.rank, failed.error.traceback)
    if isinstance(error, OutOfMemoryError) and failed.fits and spec.hosts == 1:
        devices = ",".join(str(spec.devices[rank]) for rank in failed.fits)
        smaller = devices if spec.device_type == "cuda" else f"cpu:{len(failed.fits)}"
        fix = "It fits on the others: set devices to {smaller} in Parallel Config."
        return OutOfMemoryError(error.cause, fix, smaller=smaller)
    return error
