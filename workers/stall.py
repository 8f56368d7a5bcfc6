"""Tells a stalled rank from a slow one. No clock and no process of its own: the supervisor feeds it."""

from __future__ import annotations

import statistics
from collections import deque
from dataclasses import dataclass, field

FLOOR_SECONDS = 60.0
STEPS_ALLOWED = 10
TICK_SECONDS = 0.5
_SUSPENDED_SECONDS = 4.0
_STEPS_KEPT = 20


@dataclass(frozen=True)
class Stall:
    """A rank that made no progress for too long, and the seconds it did not."""

    rank: int
    seconds: float


@dataclass
class StallWatch:
    """No progress for max(floor, 10 × median step) while a job is on is a stall.

    When the whole machine, or the whole tree of processes, was stopped for a while (a laptop sleeps), the supervisor
    misses its own ticks; that time counts for nobody.

    Args:
        floor: seconds.
    """

    floor: float = FLOOR_SECONDS
    _counts: dict[int, int] = field(default_factory=dict)
    _since: dict[int, float] = field(default_factory=dict)
    _steps: deque[float] = field(default_factory=lambda: deque(maxlen=_STEPS_KEPT))
    _last_step: float | None = None
    _last_tick: float | None = None

    def start(self, ranks: int, now: float) -> None:
        """A job (or a phase of it) begins: every rank has made progress just now."""
        self._since = dict.fromkeys(range(ranks), now)
        self._last_step = None
        self._last_tick = now

    def stop(self) -> None:
        """No job is on; nothing can stall."""
        self._since.clear()

    def beat(self, rank: int, count: int, now: float) -> None:
        """A heartbeat: `count` differs from the last one when the rank got on."""
        if self._counts.get(rank) != count:
            self._counts[rank] = count
            self.answered(rank, now)

    def answered(self, rank: int, now: float) -> None:
        """A message of the job came from this rank."""
        if rank in self._since:
            self._since[rank] = now

    def waited(self, now: float) -> None:
        """A rank compiles, which may take minutes; the others may be waiting for it in a collective."""
        self._since = dict.fromkeys(self._since, now)

    def step(self, now: float) -> None:
        """A step of the job is through."""
        if self._last_step is not None:
            self._steps.append(now - self._last_step)
        self._last_step = now

    @property
    def bound(self) -> float:
        """Seconds without progress that are allowed now."""
        return max(self.floor, STEPS_ALLOWED * statistics.median(self._steps)) if self._steps else self.floor

    def tick(self, now: float) -> Stall | None:
        """Called every TICK_SECONDS; return the rank that stalled longest, if one did."""
        gap = now - (self._last_tick if self._last_tick is not None else now)
        self._last_tick = now
        if gap > _SUSPENDED_SECONDS:
            self._since = {rank: since + gap for rank, since in self._since.items()}
            return None
        waits = {rank: now - since for rank, since in self._since.items()}
        worst = max(waits, key=lambda rank: waits[rank], default=None)
        return Stall(worst, waits[worst]) if worst is not None and waits[worst] > self.bound else None
