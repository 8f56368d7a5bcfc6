"""Moves many bytes with several threads: between a device and the host, and of a file into the system's cache."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path

import torch

from .files import reading
from .reading import THREADS, OnBytes, opened

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

    def copy(start: int) -> None:
        # A stream of its own, or the threads would wait for each other.
        stream = torch.cuda.Stream(region.device) if region.is_cuda else None
        with torch.no_grad(), torch.cuda.stream(stream):
            host[start : start + _PIECE].copy_(region[start : start + _PIECE])

    if region.is_cuda:
        torch.cuda.synchronize(region.device)  # threads copy on streams of their own
    _in_threads(copy, region.numel(), _PIECE, on_bytes)


def read_through(path: Path, on_bytes: OnBytes) -> None:
    """Read all of a file; `on_bytes` hears of it ten times a second, and may raise to give up.

    Raises:
        CheckpointError: it cannot be read.
    """
    buffers = threading.local()

    def read(start: int) -> None:
        if not hasattr(buffers, "own"):
            buffers.own = bytearray(_READ)
        os.preadv(descriptor, [buffers.own], start)

    with reading(path), opened(path) as descriptor:
        _in_threads(read, path.stat().st_size, _READ, on_bytes)


def _in_threads(work: Callable[[int], None], size: int, piece: int, on_bytes: OnBytes) -> None:
    """Have several threads do the work of each piece of so many bytes, by its first byte."""
    stop = threading.Event()

    def run(start: int) -> None:
        if not stop.is_set():
            work(start)

    with ThreadPoolExecutor(THREADS, thread_name_prefix="bytes") as threads:
        running = {threads.submit(run, start) for start in range(0, size, piece)}
        total = len(running)
        try:
            while running:
                done, running = wait(running, timeout=_POLL_SECONDS, return_when="FIRST_EXCEPTION")
                for future in done:
                    future.result()
                on_bytes((total - len(running)) * size // total, size)
        finally:
            stop.set()
