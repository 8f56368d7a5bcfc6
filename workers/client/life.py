"""One life of a pool, as its client knows it. Without input or output: the thread that reads tells it what came."""

from __future__ import annotations

import queue
import threading
import time
from dataclasses import dataclass, field
from typing import Literal

from parallel_runtime.errors import PoolError

from ..wire.frames import Frame
from ..wire.protocol import Doing, Done, Failed, Progress, Status

COMPILING_SECONDS = 5.0  # a rank that compiles says so once a second

State = Literal["starting", "idle", "busy", "cancelled", "dying", "gone"]
"""`starting`: not all ranks are online. `idle`: it can take a job. `busy`: a job is waited for. `cancelled`: one goes
on that nobody waits for any more. `dying`: it takes no job, and ends. `gone`: nothing comes of it any more."""
Reason = Literal["turn", "cancelled", "pause", "start", "weights", "measuring", "compile", "job"]
"""`turn`: another request is being served; `cancelled`: a job that was cancelled ends; `pause`: a pool that died again
and again is not replaced at once; `start`: ranks come up; `weights`: they go to the devices; `measuring`: kernels and
links are timed; `compile`: a graph is made; `job`: the ranks are at work."""


@dataclass(frozen=True)
class Wait:
    """What somebody who waits for a pool waits for, and how far it is (`done` of `total` ranks that are up, or bytes of
    weights that are on the device; 0 where nothing is counted): plain data, for the node that says it."""

    reason: Reason = "job"
    done: int = 0
    total: int = 0


@dataclass
class OpenJob:
    """A job that is sent. `goes_on`: nothing was heard of its end; `since`: when it was left to itself; `steps`: when
    each was told of."""

    number: int
    frames: queue.SimpleQueue[Frame] = field(default_factory=queue.SimpleQueue)
    awaited: bool = True
    goes_on: bool = True
    since: float = 0.0
    steps: list[float] = field(default_factory=list)


class Life:
    """Thread-safe. There is one job at a time."""

    def __init__(self, ranks: int):
        self.state: State = "starting"
        self.status: Status | None = None  # what the supervisor said last
        self.error: PoolError | None = None  # why it takes no job any more, where that is known
        self.changed = threading.Condition(threading.RLock())
        self._ranks = ranks
        self._job = OpenJob(0)
        self._wait = Wait()
        self._compiled = 0.0  # when a rank last said that it compiles

    @property
    def alive(self) -> bool:
        """It can take a job, now or later."""
        return self.state not in ("dying", "gone")

    @property
    def waits_for(self) -> Wait:
        """What a request that was sent to it, or wants to be, is waiting for."""
        if self.state == "starting":
            return Wait("start", len(self.status.devices) if self.status is not None else 0, self._ranks)
        return Wait("cancelled") if self.state == "cancelled" else self._wait

    @property
    def cancelled_for(self) -> float:
        """Seconds since the job was cancelled that goes on; 0 where a rank compiles, which the next one needs, too."""
        now = time.monotonic()
        return 0.0 if now - self._compiled < COMPILING_SECONDS else now - self._job.since

    def take(self, frame: Frame) -> None:
        """Something came from the supervisor."""
        message = frame.message
        with self.changed:
            if isinstance(message, Status):
                self.status = message
                if message.error is not None:  # it is dead
                    self.die(PoolError(message.error.cause, message.error.fix))
                elif self.state == "starting" and message.state != "starting":
                    self.state = "idle"
            elif isinstance(message, Doing):
                self._wait = Wait(message.what, message.done, message.total)
                if message.what == "compile":
                    self._compiled = time.monotonic()
            else:
                self._wait = Wait()
                self._take_of_job(frame)
            self.changed.notify_all()

    def _take_of_job(self, frame: Frame) -> None:
        message, job = frame.message, self._job
        if isinstance(message, Failed) and not message.pool_alive:
            self.die(None)  # its last status is still on the way
        if getattr(message, "number", None) != job.number:
            return
        if isinstance(message, (Done, Failed)):
            job.goes_on = False
        elif isinstance(message, Progress):
            job.steps.append(time.monotonic())
        if job.awaited:
            job.frames.put(frame)
        elif self.state == "cancelled" and not job.goes_on:
            self.state = "idle"

    def begin(self) -> OpenJob:
        """A job is about to be sent, and waited for. One that is sent to a dying pool is told so by the supervisor."""
        with self.changed:
            self._job = OpenJob(self._job.number + 1)
            if self.alive:
                self.state = "busy"
            return self._job

    def end(self, job: OpenJob) -> bool:
        """Wait no longer for a job; return whether it goes on, for nobody: its end is noted when it comes."""
        with self.changed:
            job.awaited, job.since = False, time.monotonic()
            if self.state == "busy":
                self.state = "cancelled" if job.goes_on else "idle"
            return self.state == "cancelled"

    def die(self, error: PoolError | None) -> None:
        """It takes no job any more."""
        with self.changed:
            self.error = self.error or error
            if self.state != "gone":
                self.state = "dying"
            self.changed.notify_all()

    def close(self) -> None:
        """Nothing comes any more."""
        with self.changed:
            self.state = "gone"
            self.changed.notify_all()


ASK_SECONDS = 5.0
GIVE_UP_SECONDS = 25.0
_SUSPENDED_SECONDS = 4.0


class Silence:
    """Who hears nothing asks; whom a question gets no answer from is given up. Time in which this process itself was
    stopped, or busy elsewhere, does not count."""

    def __init__(self, now: float):
        self._last_tick = now
        self.heard(now)

    def heard(self, now: float) -> None:
        """Anything came."""
        self._heard, self._asked = now, False

    def tick(self, now: float) -> Literal["wait", "ask", "give up"]:
        """Called often while something is awaited; what to do now."""
        gap, self._last_tick = now - self._last_tick, now
        if gap > _SUSPENDED_SECONDS:
            self.heard(now)
        quiet = now - self._heard
        if quiet > GIVE_UP_SECONDS and self._asked:
            return "give up"
        if quiet > ASK_SECONDS and not self._asked:
            self._asked = True
            return "ask"
        return "wait"
