"""What ranks of one host tell each other of their shares without a collective: words in memory that one rank writes."""

from __future__ import annotations

import mmap
import time
import weakref
from collections.abc import Callable
from typing import Any

import torch

from ..errors import PoolError
from ..gpu_memory.cuda_driver import unregister
from .share_memory import HostShare, open_host_share

STATE, LAUNCHED, FINISHED, OPEN, MADE = range(5)
"""Which weights are in the share, 0 for none; forwards that were launched, and those that are through, which the GPU
counts; whether shares of others are open; how often the share's memory was made or let go."""
_WAIT_SECONDS = 120.0  # a rank that reads its file again has that long; one that has died ends the pool sooner


class Board:
    """The words of one rank: this one's, or those at another's address."""

    def __init__(self, address: str | None = None):
        self._page = HostShare(mmap.PAGESIZE) if address is None else open_host_share(address)
        self.address = self._page.address
        self.words = self._page.memory.numpy().data.cast("q")
        self._finished = self._page.memory.view(torch.int64)[FINISHED : FINISHED + 1]
        self._counter: torch.Tensor | None = None

    def count_finished(self, device: torch.device) -> None:
        """What the current stream has been given before raises FINISHED when it is through."""
        if device.type != "cuda":
            self.words[FINISHED] = self.words[LAUNCHED]
            return
        if self._counter is None:
            self._page.pin()
            if self._page.pinned:
                # Before the page is unmapped, whose address another may get; its rank has waited for its forwards.
                weakref.finalize(self, unregister, self._page.memory.data_ptr()).atexit = False
            self._counter = torch.full((1,), self.words[LAUNCHED] - 1, dtype=torch.int64, device=device)
        self._counter += 1
        self._finished.copy_(self._counter, non_blocking=True)


def wait_for(about: Any, there: Callable[[Any], bool], what: str) -> None:
    """Wait until `there` finds that other ranks have done it; PoolError, with `what`, where it does not come."""
    deadline, pause = time.monotonic() + _WAIT_SECONDS, 0.0
    while not there(about):
        if time.monotonic() > deadline:
            cause, seconds = "A worker waited {wait_seconds} s for {what}.", f"{_WAIT_SECONDS:.0f}"
            raise PoolError(cause, "Queue the prompt again.", wait_seconds=seconds, what=what)
        time.sleep(pause)
        pause = min(pause + 1e-5, 1e-3)
