"""From a rank's beginning to the first step that it computes: what the artist waits for, told once in the log."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

log = logging.getLogger("rank")


class FirstStep:
    """Adds up what the time went by with.

    Args:
        start: seconds from the process's beginning until it waits for its first job.
        compiled: seconds of making graphs, or of taking them from the disk, so far.
    """

    def __init__(self, start: float, compiled: Callable[[], float], clock: Callable[[], float] = time.monotonic):
        self._clock = clock
        self._compiled = compiled
        self._seconds = {"start": start}
        self._last = clock()
        self._first_weights: float | None = None
        self._weights = 0.0
        self._told = False

    def lap(self, name: str) -> None:
        """What went on until now, since the last call: a job, or waiting for one."""
        now = self._clock()
        self._seconds[name] = self._seconds.get(name, 0.0) + now - self._last
        self._last = now

    def weights(self) -> None:
        """Weights come to the device, from the first call of this to the last."""
        now = self._clock()
        if self._first_weights is None:
            self._first_weights = now
        self._weights = now - self._first_weights

    def step(self, job: str) -> None:
        """A step of this job is through."""
        if self._told:
            return
        self._told = True
        self.lap(job)
        parts = [f"{name} {seconds:.1f}" for name, seconds in self._seconds.items()]
        log.info(
            "First step %.1f s after this process began: %s; of these weights %.1f, graphs %.1f.",
            sum(self._seconds.values()),
            ", ".join(parts),
            self._weights,
            self._compiled(),
        )
