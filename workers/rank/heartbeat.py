"""A rank's signs of life: what it has got on with, and whether it compiles, told of once a second."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
from collections.abc import Callable

import torch.distributed as dist

from parallel_runtime.acceleration.compiler import watch

from ..wire.connection import ConnectionClosed
from ..wire.protocol import Doing
from ..wire.protocol import Heartbeat as Beat
from .joining import Channel

HEARTBEAT_SECONDS = 1.0
COMPILE_SECONDS = 900.0  # a graph that takes longer has stalled


class Heartbeat:
    """One of a process; `blocks`: how many blocks of a transformer have run."""

    def __init__(self, connection: Channel, rank: int, *, blocks: Callable[[], int]):
        self.job: int | None = None  # the rank's last
        self._connection = connection
        self._rank = rank
        self._blocks = blocks
        self._progress = 0
        self._compiling_since: float | None = None  # the graph that is being made now, if any
        self._watches_compiler = False

    @property
    def progress(self) -> int:
        """Rises whenever this rank gets on: with a job, a forward's blocks, or an import (a minute on a cold disk)."""
        return self._progress + self._blocks() + len(sys.modules)

    def got_on(self) -> None:
        """A piece of a job is done."""
        self._progress += 1

    def beat(self) -> None:
        """Heartbeat thread."""
        with contextlib.suppress(ConnectionClosed):
            while True:
                threading.Event().wait(HEARTBEAT_SECONDS)
                self._connection.send(Beat(self._rank, self.progress, in_collective()))
                since, job = self._compiling_since, self.job
                if since is not None and job is not None and time.monotonic() - since < COMPILE_SECONDS:
                    self._connection.send(Doing(job, "compile"))

    def watch_compiler(self) -> None:
        """Before this process compiles: that takes minutes without a step, so the heartbeat tells of it, and each graph
        counts as progress. Not before, as the compiler takes seconds to import."""
        if not self._watches_compiler:
            self._watches_compiler = True
            watch(lambda: self._compile(time.monotonic()), lambda: self._compile(None))

    def _compile(self, since: float | None) -> None:
        self.got_on()
        self._compiling_since = since


def in_collective() -> bool:
    """Whether the main thread is inside of a call of torch.distributed."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    return frame is not None and frame.f_code.co_filename.startswith(os.path.dirname(dist.__file__))
