"""Copies the bytes of a region between a device and the host."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor, wait

import torch

from .reading import THREADS, OnBytes

_PIECE = 64 << 20
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
