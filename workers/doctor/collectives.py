"""Collectives that are checked and timed: the rank side of the doctor's link check."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch
import torch.distributed as dist

from ..link_result import Rates

_ROUNDS = 3
_PATTERN = 1021  # prime, so that no chunk looks like its neighbour; small, so that sums are exact in float32


class WrongResult(Exception):
    """A collective finished and its result is wrong."""


def check_and_measure(device: torch.device, backend: str, megabytes: int, repeats: int) -> Rates:
    """Verify an all-reduce and an all-to-all over the whole world, then time them. Collective.

    Bandwidth is bus bandwidth as NCCL's tests define it: bytes of one rank's buffer over time, times 2(n − 1)/n for an
    all-reduce and (n − 1)/n for an all-to-all, which is what a rank really sends; so it can be compared with the
    link's own rate, whatever n is.

    Args:
        device: where the buffers lie; chooses the backend.
        backend: its name, for the result.
        megabytes: size of one rank's buffer, in units of 10^6 bytes.
        repeats: collectives in one of the three timed rounds.

    Raises:
        WrongResult: on the ranks that see it.
    """
    world = dist.get_world_size()
    count = megabytes * 1_000_000 // 4 // world * world
    buffer = torch.empty(count, device=device)
    verify_all_reduce(buffer)
    verify_all_to_all(buffer)
    small = torch.zeros(1, device=device)
    latency = _seconds(lambda: dist.all_reduce(small), 5 * repeats)
    if world == 1:
        return Rates(backend, world, megabytes, None, None, latency * 1e6)
    received = torch.empty_like(buffer)
    buffer.zero_()  # sums of sums would overflow; the rate does not depend on the values
    reduce_seconds = _seconds(lambda: dist.all_reduce(buffer), repeats)
    exchange_seconds = _seconds(lambda: dist.all_to_all_single(received, buffer), repeats)
    sent = count * 4 * (world - 1) / world
    return Rates(
        backend, world, megabytes, 2 * sent / reduce_seconds / 1e9, sent / exchange_seconds / 1e9, latency * 1e6
    )


def verify_all_reduce(buffer: torch.Tensor) -> None:
    """Sum a known pattern over the ranks. Overwrites `buffer` (n,) float32.

    Raises:
        WrongResult: another sum.
    """
    world, rank = dist.get_world_size(), dist.get_rank()
    pattern = torch.arange(buffer.numel(), dtype=torch.int32, device=buffer.device) % _PATTERN
    buffer.copy_(pattern * (rank + 1))
    dist.all_reduce(buffer)
    wrong = int((buffer != pattern * (world * (world + 1) // 2)).sum())
    if wrong:
        raise WrongResult(f"all-reduce gave {wrong} wrong numbers out of {buffer.numel()}")


def verify_all_to_all(buffer: torch.Tensor) -> None:
    """Exchange chunks that name sender and receiver. Overwrites `buffer` (n,) float32, n a multiple of the ranks.

    Raises:
        WrongResult: chunks that are damaged, or from another rank.
    """
    world, rank = dist.get_world_size(), dist.get_rank()
    ranks = torch.arange(world, device=buffer.device)[:, None]
    pattern = torch.arange(buffer.numel() // world, dtype=torch.int32, device=buffer.device)[None] % _PATTERN
    buffer.copy_((pattern + rank * world + ranks).flatten())
    received = torch.empty_like(buffer)
    dist.all_to_all_single(received, buffer)
    wrong = int((received != (pattern + ranks * world + rank).flatten()).sum())
    if wrong:
        raise WrongResult(f"all-to-all gave {wrong} wrong numbers out of {buffer.numel()}")


def _seconds(collective: Callable[[], object], repeats: int) -> float:
    """Median over the rounds of the time of one collective; the first, untimed round warms up."""
    rounds = []
    for _ in range(_ROUNDS + 1):
        dist.barrier()
        _synchronize()
        start = time.perf_counter()
        for _ in range(repeats):
            collective()
        _synchronize()
        rounds.append((time.perf_counter() - start) / repeats)
    return statistics.median(rounds[1:])


def _synchronize() -> None:
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        torch.cuda.synchronize()
