"""How many exchanges this rank has launched, by their groups: where all ranks of a group have launched as many, and all
of them have come to an end, nobody waits for anybody. So a failure of all ranks alike need not cost the pool."""

from __future__ import annotations

import logging
import threading
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist

MESSAGE, REPLAY = "messages", "replays"

TALLY: Counter[tuple[str, str]] = Counter()
"""What torch does not count: (name of a group, what) -> how often. Where it is equal on all ranks of the group, nothing
that one of them launched is missing on another: a message counts where it is sent, and where its receive is posted."""


def count(what: str, group: dist.ProcessGroup | None) -> None:
    """Something was launched over a group; None is this rank alone."""
    if group is not None:
        TALLY[group.group_name, what] += 1


_BROKEN_OFF = threading.Event()


@contextmanager
def unbroken() -> Iterator[None]:
    """Around the launch of an exchange of several messages with flags of our own. Where it breaks off, words that say
    who has read what stay as they are, however alike the ranks failed: the next exchange would read what is old, so
    nothing counts as ended any more. What was only recorded has done nothing."""
    try:
        yield
    except BaseException:
        if not (torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()):
            _BROKEN_OFF.set()
        raise


log = logging.getLogger(__name__)

_END_SECONDS = 3.0
"""So long what runs on the GPU may take to end; an exchange that another rank has not launched never does."""


def launched(device: torch.device) -> Mapping[tuple[tuple[int, ...], str], int] | None:
    """(ranks of a group, what is counted) -> how often; None where not all has come to an end, or this torch does not
    tell."""
    if _BROKEN_OFF.is_set() or not _ends(device):
        return None
    counts: dict[tuple[tuple[int, ...], str], int] = {}
    if not dist.is_initialized():
        return counts
    try:
        for group in dist.distributed_c10d._world.pg_map:
            ranks = tuple(dist.get_process_group_ranks(group))
            for kind in group._device_types:
                backend: Any = group._get_backend(kind)
                counts[ranks, f"{kind.type} of {group.group_name}"] = backend._get_sequence_number_for_group()
            for what in (MESSAGE, REPLAY):
                counts[ranks, f"{what} of {group.group_name}"] = TALLY[group.group_name, what]
    except (AttributeError, RuntimeError, TypeError) as error:
        log.warning("A failure of all ranks ends the pool, as this torch does not count exchanges: %s", error)
        return None
    return counts


def _ends(device: torch.device) -> bool:
    """Whether all that was launched on a device has ended, without an error."""
    if device.type != "cuda":
        return True
    ended = threading.Event()

    def wait() -> None:
        try:
            torch.cuda.synchronize(device)
        except RuntimeError as error:
            log.warning("The GPU itself failed: %s", str(error).partition("\n")[0])
        else:
            ended.set()

    thread = threading.Thread(target=wait, name="last exchanges", daemon=True)
    thread.start()
    thread.join(_END_SECONDS)
    return ended.is_set()
