"""What somebody who waits for a pool is waiting for: plain data, for the node that says it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Reason = Literal["turn", "cancelled", "pause", "start", "weights", "measuring", "job"]


@dataclass(frozen=True)
class Wait:
    """What goes on, and how far it is.

    Args:
        reason: `turn`: another request is being served; `cancelled`: a job that was cancelled ends; `pause`: a pool
            that died again and again is not replaced at once; `start`: ranks come up; `weights`: they go to
            the devices; `measuring`: kernels and links are timed; `job`: the ranks are at work.
        done, total: ranks that are up, or bytes of weights that are on the device; 0 where nothing is counted.
    """

    reason: Reason = "job"
    done: int = 0
    total: int = 0
