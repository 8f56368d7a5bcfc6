"""When to look for an answer: not long before it is due, all the time about then, ever more seldom after."""

from __future__ import annotations

from collections import OrderedDict

_LEAD_PART, _LEAST_LEAD, _MOST_LEAD = 0.05, 0.2e-3, 1.5e-3
_LATE_PART, _LEAST_PAUSE = 0.02, 20e-6
_LONGER_PART = 0.25
_KEPT = 32


class Patience:
    """Knows how long calls of each kind take. Without a clock: the client feeds it."""

    def __init__(self) -> None:
        self._lasts: OrderedDict[int, float] = OrderedDict()

    def pause(self, kind: int, waited: float) -> float:
        """Seconds until the next look for the answer of a call that has been waited for so long.

        0 about when it is due: for at most 3 ms, as looking all the time keeps a core busy. When that is not known, or
        over, each pause is a fiftieth of the time since.
        """
        due = self._lasts.get(kind, 0.0)
        lead = min(max(_LEAD_PART * due, _LEAST_LEAD), _MOST_LEAD) if due else 0.0
        if waited < due - lead:
            return due - lead - waited
        late = waited - due - lead
        return max(_LATE_PART * late, _LEAST_PAUSE) if late >= 0 else 0.0

    def took(self, kind: int, seconds: float) -> None:
        """A call has been answered. One that took longer than those before it may have been held up."""
        before = self._lasts.pop(kind, seconds)
        self._lasts[kind] = min(seconds, before + _LONGER_PART * (seconds - before))
        while len(self._lasts) > _KEPT:
            self._lasts.popitem(last=False)
