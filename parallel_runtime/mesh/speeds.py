"""How fast the ranks' devices are beside each other, so that unlike GPUs get unlike shares of the tokens."""

from __future__ import annotations

import time
import zlib
from collections.abc import Callable

import torch
import torch.distributed as dist

from ..memory import device_kind

_SIZE = 4096  # rows and columns of the matrices whose product is timed: what a block's linear layers are made of
_WARM_CALLS, _TIMED_CALLS = 3, 50
_STEP = 0.05
"""Speeds are told in steps of this part of the fastest. Finer than that is noise, and another split of the tokens is
another set of shapes for compiled graphs."""


def compare_devices(device: torch.device, world_size: int) -> tuple[bool, list[float] | None]:
    """Whether the ranks' devices are of several kinds, so that they may round and draw noise otherwise; and the speed
    of every rank, the fastest 1.0, None where they are equal, as those of one kind are. Collective over the default
    group, on CPU tensors; the same answer on all ranks."""
    if world_size == 1 or device.type != "cuda":
        return False, None
    kinds = gather_from_ranks([float(zlib.crc32(device_kind(device).encode()))], world_size)
    if all(kind == kinds[0] for kind in kinds):
        return False, None
    measured = gather_from_ranks([_products_per_second(device)], world_size)
    return True, relative_speeds([speed for (speed,) in measured])


def relative_speeds(measured: list[float]) -> list[float] | None:
    """Return speeds in steps of the fastest, at least one step; None where they are equal."""
    fastest = max(measured)
    speeds = [max(1, round(speed / fastest / _STEP)) * _STEP for speed in measured]
    return speeds if len(set(speeds)) > 1 else None


def gather_from_ranks(numbers: list[float], world_size: int) -> list[list[float]]:
    """Every rank's numbers, in rank order. Collective over the default group; one rank needs none."""
    if world_size == 1:
        return [numbers]
    # On the CPU, over gloo: NCCL would set up its channels for these few bytes, and a full GPU could not take part.
    own = torch.tensor(numbers, dtype=torch.float64)
    everyone = [torch.empty_like(own) for _ in range(world_size)]
    dist.all_gather(everyone, own)
    return [part.tolist() for part in everyone]


def _products_per_second(device: torch.device) -> float:
    # In the type of most models: in which one GPU is ahead of another depends on it.
    one, other = torch.randn(2, _SIZE, _SIZE, device=device, dtype=torch.bfloat16).unbind(0)
    seconds_of(lambda: one @ other, _WARM_CALLS, device)
    return 1 / seconds_of(lambda: one @ other, _TIMED_CALLS, device)


def seconds_of(work: Callable[[], object], repeats: int, device: torch.device) -> float:
    """Mean of so many calls, to the end of what they launch."""
    synchronize = torch.cuda.synchronize if device.type == "cuda" else torch.cpu.synchronize
    synchronize(device)
    start = time.perf_counter()
    for _ in range(repeats):
        work()
    synchronize(device)
    return (time.perf_counter() - start) / repeats
