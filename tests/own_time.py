"""How long processes took of their own: the clock, less what their threads stood in line for a CPU.

A busy machine makes threads stand in line; a regression makes them work, or wait for something else.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from pathlib import Path


class OwnTime:
    """Begins when it is made.

    Args:
        processes: numbers of those whose waiting is taken off, asked at each `look`; those that end are seen by a
            `look` before that alone.
    """

    def __init__(self, processes: Callable[[], Iterable[int]]):
        self._processes = processes
        self._before = self._waited = self._read()
        self._begin = time.monotonic()

    def look(self) -> float:
        """Seconds so far."""
        self._waited = self._waited | self._read()
        waited = sum(seconds - self._before.get(thread, 0.0) for thread, seconds in self._waited.items())
        return time.monotonic() - self._begin - waited

    def _read(self) -> dict[tuple[int, str], float]:
        """Seconds in line of each thread; none where the kernel does not count them."""
        found = {}
        for process in self._processes():
            for file in Path(f"/proc/{process}/task").glob("*/schedstat"):
                try:
                    found[process, file.parent.name] = int(file.read_text().split()[1]) / 1e9
                except (OSError, IndexError):  # it ended
                    continue
        return found
