"""One small message in memory that processes share: seen by looking, and nobody passes it on.

A bell only ever saves time. Who looks too late, or computes on a machine where a bell does not ring, gets the same
message over the sockets.
"""

from __future__ import annotations

import contextlib
import os
import platform
import queue
import time
from collections.abc import Callable

from .frames import Frame

BELL_BYTES = 4096
_NUMBER, _LENGTH = 0, 1
"""Integers of 8 bytes, behind which the message's bytes follow."""
_HEAD = 16

_IN_ORDER = platform.machine() in ("x86_64", "AMD64")
"""Writes are seen in the order in which they were made. Elsewhere that takes barriers, of which Python has none."""


class Bell:
    """One direction: one process rings, others look.

    Args:
        memory: BELL_BYTES, writable, aligned to 8 bytes, zero at first.
    """

    def __init__(self, memory: memoryview):
        self._words, self._text = memory[:_HEAD].cast("Q"), memory[_HEAD:BELL_BYTES]

    def ring(self, number: int, message: bytes) -> None:
        """Say that all that belongs to this number is there. A message that is too long is left to the sockets.

        Args:
            number: positive, another one each time.
        """
        if not _IN_ORDER or len(message) > len(self._text):
            return
        self._words[_NUMBER] = 0  # who reads the last message right now finds that it has gone
        self._text[: len(message)] = message
        self._words[_LENGTH] = len(message)
        self._words[_NUMBER] = number

    def look(self, number: int) -> bytes | None:
        """The message of this number, if it was the last that was rung."""
        if self._words[_NUMBER] != number:
            return None
        message = bytes(self._text[: self._words[_LENGTH]])
        return message if self._words[_NUMBER] == number else None

    def close(self) -> None:
        """Let go of the memory: the bell is silent from now on."""
        silent = memoryview(bytearray(BELL_BYTES))
        self._words, self._text = silent[:_HEAD].cast("Q"), silent[_HEAD:]


def listen(
    inbox: queue.SimpleQueue[Frame],
    look: Callable[[], Frame | None],
    pause: Callable[[float], float],
    since: float,
    until: float,
) -> Frame | None:
    """What comes next, through a queue or by a look; None where nothing does until then.

    Args:
        pause: seconds since `since` -> seconds until the next look; 0 keeps a core busy.
        since, until: by time.perf_counter.
    """
    while (now := time.perf_counter()) < until:
        frame = look()
        if frame is not None:
            return frame
        seconds = min(pause(now - since), until - now)
        if not seconds:
            os.sched_yield()
        with contextlib.suppress(queue.Empty):
            return inbox.get(timeout=seconds) if seconds else inbox.get_nowait()
    return None
