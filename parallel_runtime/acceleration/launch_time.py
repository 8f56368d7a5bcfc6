"""Whether a forward takes a GPU so long that its launches are hidden: a recording of it would gain nothing."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch

_LONG = 0.5
"""Seconds. To record a forward runs it twice more, and keeps its memory."""
_LAUNCHED_IN = 0.75
"""Part of the GPU's time within which the host has launched it all; where it waits for the GPU now and then, or a long
queue is full, it takes longer than launching does."""


def timed(run: Callable[[], Any], device: torch.device) -> tuple[Any, Callable[[], bool]]:
    """Run something on the current stream; return what it gives, and what tells whether it was long, as soon as the GPU
    is through."""
    if device.type != "cuda":
        return run(), lambda: False
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    started = time.perf_counter()
    begin.record()
    output = run()
    end.record()
    launching = time.perf_counter() - started

    def was_long() -> bool:
        end.synchronize()
        return is_long(launching, begin.elapsed_time(end) / 1000)

    return output, was_long


def is_long(launching: float, computing: float) -> bool:
    """Whether launching is hidden behind what a GPU computes, and that takes long; both in seconds."""
    return computing >= _LONG and launching <= _LAUNCHED_IN * computing
