"""What the node that waits for the pool says, and how far its bar is. No ComfyUI needed."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from parallel_runtime.said import Said, said

if TYPE_CHECKING:
    from workers.client.life import Wait

_WORDS = {
    "turn": "Waiting for another prompt's turn on these GPUs ({seconds} s).",
    "cancelled": "Waiting for the cancelled prompt's last step to end ({seconds} s).",
    "pause": "Processes ended several times in a row: a pause before they start again ({seconds} s).",
    "start": "Starting: {done} of {total} devices are ready ({seconds} s).",
    "weights": "Loading: {done} of {total} GB.",
    "measuring": "Measuring kernels and links, once for this machine ({seconds} s).",
    "load": "Preparing the model ({seconds} s).",
    "step": "Computing ({seconds} s).",
}
"""By a reason of `Wait`, or what the ranks do otherwise."""
OPENING = Said("Opening the model file.")

_START_SECONDS = 10.0
"""About what a start takes: the bar nears its end with it, and never gets there before the ranks do."""
_BAR = 1000
QUIET_SECONDS = 0.4
"""Work that is over sooner needs no words."""


@dataclass
class WaitNotices:
    """One request after the other; told many times a second what each waits for.

    Args:
        show: puts a text on the node that is running.
        move_bar: (done, total) of that node's progress bar.
        note: (what, begin, end) of a part that is over, by `clock`.
        clock: seconds.
    """

    show: Callable[[Said], None]
    move_bar: Callable[[int, int], None] = lambda done, total: None
    note: Callable[[str, float, float], None] = lambda what, begin, end: None
    clock: Callable[[], float] = time.monotonic

    def __post_init__(self) -> None:
        self._doing = ""
        self._reason = ""
        self._since = 0.0
        self._share = 0.0  # of the bar, now and when this part began
        self._floor = 0.0
        self.last: str = ""
        """What was shown last."""

    def begin(self, doing: str) -> None:
        """A request goes out.

        Args:
            doing: "load" or "step", what the ranks do when nothing else is to be said.
        """
        self._doing, self._reason, self._since = doing, doing, self.clock()
        self._share = self._floor = 0.0

    def about(self, wait: Wait) -> None:
        """What the request waits for now."""
        now = self.clock()
        reason = self._doing if wait.reason == "job" else wait.reason
        if reason != self._reason:
            self._close(now)
            self._reason, self._since, self._floor = reason, now, self._share
        seconds = now - self._since
        if reason == self._doing and seconds < QUIET_SECONDS:
            return
        text = say(reason, wait, seconds)
        if text != self.last:
            self.tell(text)
            if (share := _bar(reason, wait, seconds)) is not None:
                self._share = self._floor + (1 - self._floor) * share  # weights after a start: the bar goes on
                self.move_bar(round(_BAR * self._share), _BAR)

    def tell(self, text: Said) -> None:
        """Show a text, whatever it is about."""
        self.last = text
        self.show(text)

    def end(self) -> None:
        """The request is through, or a step of it; what follows is the next one."""
        now = self.clock()
        self._close(now)
        self._reason, self._since = self._doing, now

    def _close(self, now: float) -> None:
        if self._reason:
            self.note(self._reason, self._since, now)


def say(reason: str, wait: Wait, seconds: float) -> Said:
    """One sentence.

    Args:
        seconds: that it has taken so far.
    """
    done, total = (round(each / 1e9, 1) if reason == "weights" else each for each in (wait.done, wait.total))
    return said(_WORDS[reason], done=done, total=total, seconds=int(seconds))


def _bar(reason: str, wait: Wait, seconds: float) -> float | None:
    """How far it is, from 0 to 1: of a start, whose parts are unlike, by the time that one takes; None where nobody
    knows."""
    if reason == "weights":
        return wait.done / max(wait.total, 1)
    if reason == "start":
        arrived = wait.done / wait.total if wait.total else 0.0
        return min(0.95, max(arrived, seconds / (seconds + _START_SECONDS)))
    return None
