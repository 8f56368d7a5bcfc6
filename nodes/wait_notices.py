"""What the node that waits for the pool says, and how far its bar is. No ComfyUI needed."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from parallel_runtime.said import Said, said

if TYPE_CHECKING:
    from workers.client.client import PoolClient
    from workers.client.life import Wait

_WORDS = {
    "turn": "Waiting for another prompt's turn on these GPUs ({seconds} s).",
    "cancelled": "Waiting for the cancelled prompt's last step to end ({seconds} s).",
    "pause": "Processes ended several times in a row: a pause before they start again ({seconds} s).",
    "start": "Starting: {done} of {total} devices are ready ({seconds} s).",
    "weights": "Loading: {done} of {total} GB.",
    "measuring": "Measuring kernels and links, once for this machine ({seconds} s).",
    "compile": "Compiling {model}, once per machine: {seconds} s.",
    "load": "Preparing the model ({seconds} s).",
    "step": "Computing ({seconds} s).",
}
"""By a reason of `Wait`, or what the ranks do otherwise."""
OPENING = Said("Opening the model file.")

_START_SECONDS, _COMPILE_SECONDS = 10.0, 60.0
"""About what each takes: the bar nears its end with it, and never gets there before the ranks do."""
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
        model: its file's name.
    """

    show: Callable[[Said], None]
    move_bar: Callable[[int, int], None] = lambda done, total: None
    note: Callable[[str, float, float], None] = lambda what, begin, end: None
    clock: Callable[[], float] = time.monotonic
    model: str = ""

    def __post_init__(self) -> None:
        self._doing = ""
        self._reason = ""
        self._since = 0.0
        self._began: dict[str, float] = {}  # of each reason since the last step
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
        reason, done, total = self._doing if wait.reason == "job" else wait.reason, wait.done, wait.total
        now = self.clock()
        self._began.setdefault(reason, now)
        if reason != self._reason:
            self._close(now)
            self._reason, self._since, self._floor = reason, now, self._share
        seconds = now - self._since
        if reason == self._doing and seconds < QUIET_SECONDS:
            return
        text = self._say(reason, done, total, seconds)
        if text != self.last:
            self.tell(text)
            if (share := _bar(reason, done, total, seconds)) is not None:
                self._share = self._floor + (1 - self._floor) * share  # weights after a start: the bar goes on
                self.move_bar(round(_BAR * self._share), _BAR)

    def watching(self, pool: PoolClient, should_cancel: Callable[[], bool], doing: str = "step") -> Callable[[], bool]:
        """`should_cancel` of a request that goes out: the client asks it many times a second while it waits, and each
        time the node is told what for."""
        self.begin(doing)

        def ask() -> bool:
            self.about(pool.waits_for)
            return should_cancel()

        return ask

    def tell(self, text: Said) -> None:
        """Show a text, whatever it is about."""
        self.last = text
        self.show(text)

    def end(self) -> dict[str, float]:
        """The request is through, or a step of it; what follows is the next one.

        Returns:
            What was waited for since the last one, and how long ago that began.
        """
        now = self.clock()
        self._close(now)
        self._reason, self._since = self._doing, now
        waited = {reason: now - since for reason, since in self._began.items()}
        self._began.clear()
        return waited

    def _close(self, now: float) -> None:
        if self._reason:
            self.note(self._reason, self._since, now)

    def _say(self, reason: str, done: float, total: float, seconds: float) -> Said:
        if reason == "weights":
            done, total = round(done / 1e9, 1), round(total / 1e9, 1)
        return said(_WORDS[reason], done=done, total=total, seconds=int(seconds), model=self.model)


def _bar(reason: str, done: int, total: int, seconds: float) -> float | None:
    """How far it is, from 0 to 1: of a start, whose parts are unlike, by the time that one takes; None where nobody
    knows."""
    if reason == "weights":
        return done / max(total, 1)
    if reason == "compile":
        return min(0.95, seconds / _COMPILE_SECONDS)
    if reason == "start":
        arrived = done / total if total else 0.0
        return min(0.95, max(arrived, seconds / (seconds + _START_SECONDS)))
    return None
