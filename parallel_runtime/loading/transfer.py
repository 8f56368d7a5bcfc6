"""Moves many bytes with several threads: between a device and the host, and of a file into the system's cache."""

from __future__ import annotations

import itertools
import os
import threading
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path

import torch

from ..errors import CheckpointError
from ..said import said
from .reading import THREADS, OnBytes

_PIECE = 64 << 20
"""Bytes of a copy."""
_READ = 16 << 20
"""Bytes that a thread reads at once."""
_POLL_SECONDS = 0.1


def to_device(region: torch.Tensor, host: torch.Tensor, on_bytes: OnBytes) -> None:
    """Fill a region from the host; at the link's speed where the host's memory is pinned. Returns when it is filled.

    Args:
        region, host: (bytes,) uint8.
    """
    for start in range(0, region.numel(), _PIECE):
        region[start : start + _PIECE].copy_(host[start : start + _PIECE], non_blocking=True)
        on_bytes(start, region.numel())
    if region.is_cuda:
        torch.cuda.synchronize(region.device)


def to_host(host: torch.Tensor, region: torch.Tensor, on_bytes: OnBytes) -> None:
    """Save a region in memory of the host that may be new: several threads, as its pages are made meanwhile."""
    stop = False

    def copy(start: int) -> None:
        if stop:
            return
        # A stream of its own, or the threads would wait for each other.
        stream = torch.cuda.Stream(region.device) if region.is_cuda else None
        with torch.no_grad(), torch.cuda.stream(stream):
            host[start : start + _PIECE].copy_(region[start : start + _PIECE])

    if region.is_cuda:
        torch.cuda.synchronize(region.device)  # threads copy on streams of their own
    with ThreadPoolExecutor(THREADS, thread_name_prefix="park") as threads:
        running = {threads.submit(copy, start) for start in range(0, region.numel(), _PIECE)}
        total = len(running)
        try:
            while running:
                done, running = wait(running, timeout=_POLL_SECONDS)
                for future in done:
                    future.result()
                on_bytes((total - len(running)) * region.numel() // total, region.numel())
        finally:
            stop = True


def read_through(path: Path, on_bytes: OnBytes) -> None:
    """Read all of a file; `on_bytes` hears of it ten times a second, and may raise to give up.

    Raises:
        CheckpointError: it cannot be read.
    """
    total = path.stat().st_size
    starts = itertools.count(0, _READ)
    turn = threading.Lock()
    stop = threading.Event()
    read = [0] * THREADS

    def work(number: int) -> None:
        buffer = bytearray(_READ)
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            while not stop.is_set():
                with turn:
                    start = next(starts)
                if start >= total:
                    return
                read[number] += os.preadv(descriptor, [buffer], start)
        finally:
            os.close(descriptor)

    with ThreadPoolExecutor(THREADS, thread_name_prefix="read through") as threads:
        running = {threads.submit(work, number) for number in range(THREADS)}
        try:
            while running:
                done, running = wait(running, timeout=_POLL_SECONDS, return_when="FIRST_EXCEPTION")
                for future in done:
                    future.result()
                on_bytes(min(sum(read), total), total)
        except OSError as error:
            raise CheckpointError(
                said("{path} cannot be read: {strerror}.", path=path, strerror=error.strerror), "Check the disk."
            ) from error
        finally:
            stop.set()
