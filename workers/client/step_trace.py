"""Where the time of a step goes, from the transformer's call in ComfyUI to its return: for `PARALLEL_DIT_TRACE=1`.

All processes of one host read the same clock (`time.perf_counter` is CLOCK_MONOTONIC on Linux), so their stamps go on
from one another.
"""

from __future__ import annotations

import itertools
import os
import statistics
from collections.abc import Sequence

PARTS = (
    "ComfyUI, between two calls",
    "compare the conditioning",
    "copy to shared memory, and ring",
    "to the ranks",
    "wake the rank",
    "copy to the GPU, hand on to the ranks",
    "launch",
    "compute, and copy to shared memory",
    "rank 0, to the client",
    "deliver",
)
"""What happens between a stamp and the next."""

EVERY = 20
PAUSE_SECONDS = 0.5
"""Calls that are further apart belong to two runs."""


class StepTrace:
    """Keeps the stamps of steps, and sums them up.

    Args:
        enabled: without it nothing is kept.
    """

    def __init__(self, enabled: bool | None = None):
        self.enabled = bool(os.environ.get("PARALLEL_DIT_TRACE")) if enabled is None else enabled
        self._steps: list[list[float]] = []
        self._returned: float | None = None

    def add(self, stamps: Sequence[float]) -> str:
        """Take in one step's stamps, in seconds, from the call on; return a summary every EVERY steps, else ""."""
        if not self.enabled or len(stamps) != len(PARTS):
            return ""
        before, self._returned = self._returned, stamps[-1]
        if before is None or stamps[0] - before > PAUSE_SECONDS:
            return ""
        stamps = (before, *stamps)
        self._steps.append([(after - before) * 1000 for before, after in itertools.pairwise(stamps)])
        if len(self._steps) < EVERY:
            return ""
        medians = [statistics.median(part) for part in zip(*self._steps, strict=True)]
        self._steps.clear()
        parts = "; ".join(f"{name} {median:.2f}" for name, median in zip(PARTS, medians, strict=True))
        return f"{EVERY} steps, median ms: {parts}; all {sum(medians):.2f}"
