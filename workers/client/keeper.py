"""Keeps a pool running: one life after the other, each on the same devices, for one request at a time."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

from parallel_runtime.errors import PoolError, PoolLostError
from parallel_runtime.requests.control import Cancelled

from ..launch import PoolSpec
from .life import Wait
from .node_requests import ShouldCancel, never
from .running_pool import POLL_SECONDS, RunningPool

log = logging.getLogger("parallel_dit")

_Result = TypeVar("_Result")

MAX_BACK_OFF_SECONDS = 30.0


class Keeper:
    """At most one running pool. What ranks held by name is gone where one starts: `on_change` is called before. A
    request takes its turn, and may take it again for others; the lock itself is for what is no request."""

    def __init__(self, spec: PoolSpec, rank_module: str, on_change: Callable[[], None]):
        self.spec = spec
        self.pool: RunningPool | None = None
        self.lock = threading.RLock()
        self._rank_module = rank_module
        self._on_change = on_change
        self._should_cancel: ShouldCancel = never  # of the request that has its turn
        self._queue: set[int] = set()  # threads that wait for theirs
        self._ended = time.monotonic()
        self._end: PoolError | None = None  # why no pool starts any more
        self._pauses = False
        self.deaths = 0  # in a row, without a job that succeeded in between

    @contextmanager
    def turn(self, should_cancel: ShouldCancel) -> Iterator[None]:
        """Hold the pool for one request, after those of other threads."""
        thread = threading.get_ident()
        try:
            while not self.lock.acquire(timeout=POLL_SECONDS):
                self._queue.add(thread)
                if should_cancel():
                    raise Cancelled
        finally:
            self._queue.discard(thread)
        before, self._should_cancel = self._should_cancel, should_cancel
        try:
            yield
        finally:
            self._should_cancel = before
            self._ended = time.monotonic()
            self.lock.release()

    def serve(self, run: Callable[[], _Result], should_cancel: ShouldCancel) -> _Result:
        """Run it in its turn, again where the pool died before it began with this: nobody knew yet of a lost rank."""
        with self.turn(should_cancel):
            try:
                return run()
            except PoolLostError as error:
                log.warning("Parallel DiT: %s A fresh pool takes its place.", error.cause)
                return run()

    @property
    def idle_seconds(self) -> float:
        """Since the last request was served; 0 while another thread's is."""
        if not self.lock.acquire(blocking=False):
            return 0.0
        self.lock.release()
        return time.monotonic() - self._ended

    @property
    def running(self) -> RunningPool | None:
        """The pool, if it can take a job."""
        return self.pool if self.pool is not None and self.pool.life.alive else None

    @property
    def waits_for(self) -> Wait:
        """What the request of the thread that asks is waiting for."""
        if threading.get_ident() in self._queue:
            return Wait("turn")
        if self._pauses:
            return Wait("pause")
        return self.pool.life.waits_for if self.pool is not None else Wait()

    def start(self) -> RunningPool:
        """The running pool, started if need be; see `PoolClient.start`."""
        pool = self.begin()
        pool.wait_until_ready()
        return pool

    def begin(self) -> RunningPool:
        """The pool, started if need be, whose ranks may be about to come: for who is about to load, too."""
        with self.lock:
            if self._end is not None:
                raise self._end
            self.settle()
            if self.pool is not None and not self.pool.life.alive:
                self.close()
                self.deaths += 1
            if self.pool is None:
                self._back_off()
                log.info("Parallel DiT: starting a pool on %s", self.spec)
                self._on_change()
                self.pool = RunningPool(self.spec, self._rank_module, lambda: self._should_cancel())
            return self.pool

    def settle(self) -> None:
        """Wait for jobs that were cancelled; see `RunningPool.settle`."""
        if self.pool is not None:
            self.pool.settle()

    def close(self, for_good: PoolError | None = None) -> None:
        """End the pool; another one may start, unless an error says why none does."""
        self._end = self._end or for_good
        if self.pool is not None:
            self.pool.close()
            self.pool = None

    def end(self, seconds: float) -> None:
        """End the pool for good, whoever works with it and holds the lock, in so many seconds: this process ends."""
        self._end = PoolError("ComfyUI is ending.", "Start it again.")
        if self.pool is not None:
            self.pool.close(seconds)

    def _back_off(self) -> None:
        """A pool that died once is replaced at once; one that dies again and again is replaced ever more slowly."""
        wait = min(2.0 ** (self.deaths - 2), MAX_BACK_OFF_SECONDS) if self.deaths > 1 else 0.0
        until = time.monotonic() + wait
        self._pauses = wait > 0
        try:
            while time.monotonic() < until:
                if self._should_cancel():
                    raise Cancelled
                time.sleep(0.05)
        finally:
            self._pauses = False
