"""What took how long: lines in the log, of a start, of slow jobs, and once of the way to the first step."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

import psutil

log = logging.getLogger("rank")


class Laps:
    """Seconds of named parts, the first of which began `since` seconds ago; of one name they add up."""

    def __init__(self, since: float = 0.0):
        self._last = time.monotonic() - since
        self._parts: dict[str, float] = {}

    @classmethod
    def of_process(cls) -> Laps:
        """The first part began with this process."""
        return cls(max(0.0, time.time() - psutil.Process().create_time()))

    def end(self, name: str) -> None:
        """A part ends, and the next begins."""
        now = time.monotonic()
        self._parts[name] = self._parts.get(name, 0.0) + now - self._last
        self._last = now

    @property
    def total(self) -> float:
        """Seconds of all parts that have ended."""
        return sum(self._parts.values())

    def __str__(self) -> str:
        return ", ".join(f"{name} {seconds:.1f} s" for name, seconds in self._parts.items())


class FirstStep(Laps):
    """The parts are jobs and waiting for them, up to the first step; `compiled`: seconds that graphs took so far."""

    def __init__(self, start: float, compiled: Callable[[], float]):
        super().__init__(start)
        self.end("start")
        self._compiled = compiled
        self._first_weights: float | None = None
        self._weights = 0.0
        self._told = False

    def weights(self) -> None:
        """Weights come to the device, from the first call of this to the last."""
        now = time.monotonic()
        self._first_weights = now if self._first_weights is None else self._first_weights
        self._weights = now - self._first_weights

    def step(self, job: str) -> None:
        """A step of this job is through."""
        if self._told:
            return
        self._told = True
        self.end(job)
        found = self.total, self, self._weights, self._compiled()
        log.info("First step %.1f s after this process began: %s; of these weights %.1f s, graphs %.1f s.", *found)
