"""Tells a stalled rank from a slow one. No clock and no process of its own: the supervisor feeds it."""

from __future__ import annotations

from dataclasses import dataclass, field

FLOOR_SECONDS = 60.0
TICK_SECONDS = 0.5
_SUSPENDED_SECONDS = 4.0


@dataclass
class StallWatch:
    """When no rank that is awaited has got on for so long, the pool has stalled.

    One rank alone that does not get on says nothing: it may wait in a collective for another that does, or for a step
    that others compute. Where one hangs, all of them stand still soon, and the one that stood still first is to blame.
    Time in which the supervisor missed its own ticks (a laptop slept) counts for nobody.
    """

    floor: float = FLOOR_SECONDS
    _counts: dict[int, int] = field(default_factory=dict)
    _since: dict[int, float] = field(default_factory=dict)
    _waits: dict[int, bool] = field(default_factory=dict)
    _last_tick: float = 0.0

    def start(self, ranks: int, now: float) -> None:
        """A job (or a phase of it) begins: every rank has made progress just now."""
        self._since = dict.fromkeys(range(ranks), now)
        self._last_tick = now

    def stop(self) -> None:
        """No job is on; nothing can stall."""
        self._since.clear()

    def beat(self, rank: int, count: int, now: float, waits: bool = False) -> None:
        """A heartbeat: `count` differs from the last one when the rank got on. Who `waits` for others is not to blame,
        as far as that can be told."""
        self._waits[rank] = waits
        if self._counts.get(rank) != count:
            self._counts[rank] = count
            self.answered(rank, now)

    def answered(self, rank: int, now: float) -> None:
        """A message of the job came from this rank."""
        if rank in self._since:
            self._since[rank] = now

    def through(self, rank: int) -> None:
        """This rank has done its part, and waits for the others: it is not awaited."""
        self._since.pop(rank, None)

    def waited(self, now: float) -> None:
        """A rank compiles, which may take minutes; the others may be waiting for it in a collective."""
        self._since = dict.fromkeys(self._since, now)

    def tick(self, now: float) -> tuple[int, float] | None:
        """Called every TICK_SECONDS; return the rank that stalled longest, if all have, and for how many seconds."""
        gap, self._last_tick = now - self._last_tick, now
        if gap > _SUSPENDED_SECONDS:
            self._since = {rank: since + gap for rank, since in self._since.items()}
            return None
        if not self._since or now - max(self._since.values()) <= self.floor:
            return None
        first = min(self._since, key=lambda rank: (self._waits.get(rank, False), self._since[rank]))
        return first, now - self._since[first]
