"""What the node that waits for the pool says, and its bar while weights are read. No ComfyUI needed."""

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

QUIET_SECONDS = 0.4
"""Work that is over sooner needs no words."""


@dataclass
class WaitNotices:
    """One request after the other, of a model by its file's name; told many times a second what each waits for. `show`
    puts a text on the node that is running, `move_bar` its progress bar to (done, total) bytes, and `note` gets (what,
    begin, end) of a part that is over, by `clock`, in seconds."""

    show: Callable[[Said], None]
    move_bar: Callable[[int, int], None] = lambda done, total: None
    note: Callable[[str, float, float], None] = lambda what, begin, end: None
    clock: Callable[[], float] = time.monotonic
    model: str = ""

    def __post_init__(self) -> None:
        self._doing = ""
        self._reason = ""
        self._since = 0.0
        self._outdated = False  # what is shown is of a wait, and would be wrong of the work after it
        self.last: str = ""
        """What was shown last."""

    def begin(self, doing: str) -> None:
        """A request goes out: "load" or "step", what the ranks do when nothing else is to be said."""
        self._doing, self._reason, self._since = doing, doing, self.clock()

    def about(self, wait: Wait) -> None:
        reason, done, total = self._doing if wait.reason == "job" else wait.reason, wait.done, wait.total
        now = self.clock()
        if reason != self._reason:
            self._close(now)
            self._reason, self._since = reason, now
        seconds = now - self._since
        works = reason == self._doing
        if works and seconds < QUIET_SECONDS and not self._outdated:
            return
        text = self._say(reason, done, total, seconds)
        if text != self.last:
            self.tell(text)
            if reason == "weights":
                self.move_bar(done, max(total, 1))
        self._outdated = not works

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
        self.last, self._outdated = text, False
        self.show(text)

    def end(self) -> None:
        """The request is through, or a step of it; what follows is the next one."""
        now = self.clock()
        self._close(now)
        self._reason, self._since = self._doing, now

    def _close(self, now: float) -> None:
        if self._reason:
            self.note(self._reason, self._since, now)

    def _say(self, reason: str, done: float, total: float, seconds: float) -> Said:
        if reason == "weights":
            done, total = round(done / 1e9, 1), round(total / 1e9, 1)
        return said(_WORDS[reason], done=done, total=total, seconds=int(seconds), model=self.model)
