"""How long tests wait: for the state itself, and so long that a busy machine is no failure."""

from __future__ import annotations

import time
from collections.abc import Callable

SOON = 30.0
"""Seconds. What takes a moment on a machine that does nothing else takes less than this on one with ten other tests;
what a test tells it from takes minutes, or for ever."""


def wait_until(holds: Callable[[], object], seconds: float = 60.0) -> bool:
    """Whether it came to hold, within so many seconds; what it raises is raised."""
    deadline = time.monotonic() + seconds
    while not holds():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True
