"""What took how long, one after the other, for a line in the log."""

from __future__ import annotations

import time

import psutil


class Laps:
    """Seconds of named parts.

    Args:
        since: seconds since the first part began.
    """

    def __init__(self, since: float = 0.0):
        self._last = time.monotonic() - since
        self._parts: list[tuple[str, float]] = []

    @classmethod
    def of_process(cls) -> Laps:
        """The first part began with this process."""
        return cls(max(0.0, time.time() - psutil.Process().create_time()))

    def end(self, name: str) -> None:
        """A part ends, and the next begins."""
        now = time.monotonic()
        self._parts.append((name, now - self._last))
        self._last = now

    @property
    def total(self) -> float:
        """Seconds of all parts that have ended."""
        return sum(seconds for _, seconds in self._parts)

    def __str__(self) -> str:
        return ", ".join(f"{name} {seconds:.1f} s" for name, seconds in self._parts)
