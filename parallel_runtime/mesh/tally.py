"""What this process has launched towards other ranks that torch does not count: messages, and replays of recordings."""

from __future__ import annotations

from collections import Counter

import torch.distributed as dist

MESSAGE, REPLAY = "messages", "replays"

TALLY: Counter[tuple[str, str]] = Counter()
"""(name of a group, what) -> how often. Where it is equal on all ranks of the group, nothing that one of them launched
is missing on another: a message counts where it is sent, and where its receive is posted."""


def count(what: str, group: dist.ProcessGroup | None) -> None:
    """Something was launched over a group; None is this rank alone."""
    if group is not None:
        TALLY[group.group_name, what] += 1
