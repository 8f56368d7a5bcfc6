"""What comes to a rank: from the supervisor, and steps from the client's bell as well."""

from __future__ import annotations

import logging
import os
import queue
import time
from collections.abc import Callable
from functools import partial

from ..client.patience import Patience
from ..wire.bell import listen
from ..wire.connection import Connection, ConnectionClosed, FrameError
from ..wire.frames import Frame
from ..wire.protocol import Abandon, Cancel, Job, Run
from .idle_imports import QUIET_SECONDS, IdleImports

LISTEN_SECONDS = 0.02
"""So long after a step a rank looks for the next one itself. ComfyUI's own part of a step takes 5 ms."""

log = logging.getLogger("rank")


class Inbox:
    """Filled by one thread, emptied by another.

    Args:
        look: the job of a number, if the client has rung for it.
    """

    def __init__(self, connection: Connection, look: Callable[[int], Frame | None]):
        self.cancelled: int | None = None
        """The job that was cancelled last."""
        self.arrived = 0.0
        """When the last frame came, by time.perf_counter."""
        self._connection = connection
        self._look_at_bell = look
        self._frames: queue.SimpleQueue[Frame] = queue.SimpleQueue()
        self._taken = 0  # number of the last job
        self._answered: float | None = None  # when, if a step may follow at once, so that it is worth looking for
        self._patience = Patience()

    def receive(self) -> None:
        """Receiver thread. The supervisor's end is this process's end, in the middle of whatever it does."""
        try:
            while True:
                frame = self._connection.receive()
                if isinstance(frame.message, Cancel):
                    self.cancelled = frame.message.number
                else:
                    self.arrived = time.perf_counter()
                    self._frames.put(frame)
        except (ConnectionClosed, FrameError) as error:
            log.info("the supervisor is gone (%s)", error)
            os._exit(0)

    def next(self, imports: IdleImports) -> Frame:
        """What comes next. A step that follows another one at once is heard by the client's bell, before the supervisor
        hands it out.

        Args:
            imports: what this thread does while nothing comes.
        """
        frame = None
        if self._answered is not None:
            pause = partial(self._patience.pause, 0)
            frame = listen(self._frames, self._look, pause, self._answered, self._answered + LISTEN_SECONDS)
        if frame is not None:
            return frame
        quiet = QUIET_SECONDS if self._taken else 0.0
        while imports:
            try:
                return self._frames.get(timeout=quiet)
            except queue.Empty:
                imports.next()
                quiet = 0.0
        return self._frames.get()

    def take(self, job: Job) -> bool:
        """Whether a job is new, and to be run: the supervisor tells of one that the bell told of before as well."""
        if job.number <= self._taken:
            return False
        if self._answered is not None:
            self._patience.took(0, time.perf_counter() - self._answered)
        self._taken, self._answered = job.number, None
        return True

    def expect_step(self) -> None:
        """A job has been answered which a step may follow at once."""
        self._answered = time.perf_counter()

    def verdict(self, number: int) -> Run | Abandon:
        """What the supervisor decides of a job that this rank has prepared."""
        while True:
            message = self._frames.get().message
            if isinstance(message, (Run, Abandon)) and message.number == number:
                return message

    def _look(self) -> Frame | None:
        """The step that the client rang for last, if it is the very next job: a rank that missed one is told of it, and
        of those that follow, by the supervisor. So all ranks run the same jobs in the same order."""
        frame = self._look_at_bell(self._taken + 1)
        if frame is not None:
            self.arrived = time.perf_counter()
        return frame
