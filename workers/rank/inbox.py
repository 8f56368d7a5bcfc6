"""What comes to a rank from the supervisor."""

from __future__ import annotations

import logging
import os
import queue

from ..wire.connection import Channel, ConnectionClosed, FrameError
from ..wire.frames import Frame
from ..wire.protocol import Abandon, Cancel, Run
from .idle_imports import QUIET_SECONDS, IdleImports

log = logging.getLogger("rank")


class Inbox:
    """Filled by one thread, emptied by another."""

    def __init__(self, connection: Channel):
        self.cancelled: int | None = None
        """The job that was cancelled last."""
        self._connection = connection
        self._frames: queue.SimpleQueue[Frame] = queue.SimpleQueue()
        self._quiet = 0.0  # how long nothing has to come before this rank imports

    def receive(self) -> None:
        """Receiver thread. The supervisor's end is this process's end, in the middle of whatever it does."""
        try:
            while True:
                frame = self._connection.receive()
                if isinstance(frame.message, Cancel):
                    self.cancelled = frame.message.number
                else:
                    self._frames.put(frame)
        except (ConnectionClosed, FrameError) as error:
            log.info("the supervisor is gone (%s)", error)
            os._exit(1)  # not 0: torchrun of another machine would wait for those of this one

    def next(self, imports: IdleImports) -> Frame:
        """What comes next.

        Args:
            imports: what this thread does while nothing comes.
        """
        quiet, self._quiet = self._quiet, QUIET_SECONDS
        while imports:
            try:
                return self._frames.get(timeout=quiet)
            except queue.Empty:
                imports.next()
                quiet = 0.0
        return self._frames.get()

    def verdict(self, number: int) -> Run | Abandon:
        """What the supervisor decides of a job that this rank has prepared."""
        while True:
            message = self._frames.get().message
            if isinstance(message, (Run, Abandon)) and message.number == number:
                return message
