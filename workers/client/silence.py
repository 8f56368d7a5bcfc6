"""Tells a supervisor that does not answer from one that has nothing to say. Without a clock: the client feeds it."""

from __future__ import annotations

from typing import Literal

ASK_SECONDS = 5.0
GIVE_UP_SECONDS = 25.0
_SUSPENDED_SECONDS = 4.0


class Silence:
    """Who hears nothing asks; whom a question gets no answer from is given up.

    When this process itself was stopped for a while, or was busy elsewhere, the supervisor could not be heard; that
    time does not count.
    """

    def __init__(self, now: float):
        self._heard = now
        self._last_tick = now
        self._asked = False

    def heard(self, now: float) -> None:
        """Anything came."""
        self._heard, self._asked = now, False

    def tick(self, now: float) -> Literal["wait", "ask", "give up"]:
        """Called often while something is awaited; what to do now."""
        gap, self._last_tick = now - self._last_tick, now
        if gap > _SUSPENDED_SECONDS:
            self._heard, self._asked = now, False
        quiet = now - self._heard
        if quiet > GIVE_UP_SECONDS and self._asked:
            return "give up"
        if quiet > ASK_SECONDS and not self._asked:
            self._asked = True
            return "ask"
        return "wait"

    @property
    def seconds(self) -> float:
        """Since the supervisor was heard, at the last tick."""
        return self._last_tick - self._heard
