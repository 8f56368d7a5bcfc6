"""Whose turn it is: a pool serves one request at a time, and whoever waits can hear a cancel."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

from parallel_runtime.requests.control import Cancelled

from .requests import ShouldCancel, never

POLL_SECONDS = 0.05


class Turns:
    """Taken for requests, each of which may take it again for others; the lock itself is for what is none."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self._queue: set[int] = set()
        self._ended = time.monotonic()
        self._should_cancel: ShouldCancel = never

    def cancelled(self) -> bool:
        """Whether the request that has its turn is to end. Asked by its thread alone, many times a second."""
        return self._should_cancel()

    @property
    def waiting(self) -> bool:
        """Whether the thread that asks waits for its turn."""
        return threading.get_ident() in self._queue

    @property
    def idle_seconds(self) -> float:
        """Since the last request was served; 0 while another thread's is."""
        if not self.lock.acquire(blocking=False):
            return 0.0
        self.lock.release()
        return time.monotonic() - self._ended

    @contextmanager
    def take(self, should_cancel: ShouldCancel = never) -> Iterator[None]:
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
