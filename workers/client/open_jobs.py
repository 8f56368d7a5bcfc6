"""The jobs of a pool that have not ended: those that somebody waits for, and cancelled ones that go on without."""

from __future__ import annotations

import contextlib
import itertools
import queue
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field

from ..wire.frames import Frame
from ..wire.protocol import Compiling, Done, Failed

COMPILING_SECONDS = 5.0
"""A rank that compiles says so once a second."""


@dataclass(frozen=True)
class OpenJob:
    """A job by its number, and what the reader thread has put there of it."""

    number: int
    frames: queue.SimpleQueue[Frame] = field(default_factory=queue.SimpleQueue)

    def hear(self, seconds: float) -> Frame | None:
        """What comes next of it; None where nothing does for so long."""
        with contextlib.suppress(queue.Empty):
            return self.frames.get(timeout=seconds)
        return None


class OpenJobs:
    """Thread-safe: one thread reads, another waits."""

    def __init__(self) -> None:
        self.pool_dies = False
        """A job was told that the pool dies with it; the pool's last status may still be on the way."""
        self._numbers = itertools.count(1)
        self._awaited: dict[int, OpenJob] = {}
        self._abandoned: dict[int, float] = {}  # and since when
        self._compiled = 0.0  # when a rank last said that it compiles
        self._lock = threading.Lock()

    @property
    def abandoned(self) -> Mapping[int, float]:
        """Cancelled jobs that go on, and since when."""
        return self._abandoned

    def compiles(self) -> bool:
        """Whether a rank compiles now."""
        return time.monotonic() - self._compiled < COMPILING_SECONDS

    def open(self) -> OpenJob:
        """A job that is waited for from now on."""
        job = OpenJob(next(self._numbers))
        self._awaited[job.number] = job
        return job

    def take(self, number: int, frame: Frame) -> None:
        """Hand a frame to who waits for its job; where nobody does, note the job's end."""
        message = frame.message
        if isinstance(message, Compiling):
            self._compiled = time.monotonic()
        with self._lock:
            job = self._awaited.get(number)
            if job is not None:
                job.frames.put(frame)
            elif isinstance(message, (Done, Failed)):
                if isinstance(message, Failed):
                    self.note_failure(message)
                self._abandoned.pop(number, None)

    def note_failure(self, failed: Failed) -> None:
        """Take in whether the pool survives a failure."""
        self.pool_dies |= not failed.pool_alive

    def abandon(self, job: OpenJob, since: float) -> None:
        """Wait no longer for a cancelled job; its end is noted when it comes."""
        with self._lock:
            self._abandoned[job.number] = since
        self.leave(job)

    def leave(self, job: OpenJob) -> None:
        """Wait no longer for a job. What comes of it from now on, or has come since the last look, is noted."""
        with self._lock:
            self._awaited.pop(job.number, None)
        while not job.frames.empty():
            self.take(job.number, job.frames.get())
