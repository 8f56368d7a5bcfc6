"""What took how long: lines in the log, of a start and of slow jobs."""

from __future__ import annotations

import time

import psutil


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
