"""A rank of the doctor's check: joins a process group as the pool's ranks do, and exchanges numbers. It tells what it
is at, and at the end what it measured or why it failed, as lines of JSON in a file of its own."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from parallel_runtime.mesh.speeds import seconds_of

from ..launch import PoolSpec
from ..rank.joining import join, take_device

Tell = Callable[..., None]
_PATTERN = 1021  # prime, so that no chunk looks like its neighbour


class WrongResult(Exception):
    """An exchange finished and its result is wrong."""


def exchange(spec: PoolSpec, rank: int, directory: Path, tell: Tell) -> dict[str, Any]:
    """Join, check that gloo and, on GPUs, NCCL give the right numbers, and time the one that pictures go over."""
    on_gpu, world = spec.device_type == "cuda", spec.world_size
    if on_gpu:
        tell(stage=f"taking GPU {spec.devices[rank]}")
    device = take_device(spec, rank)
    tell(stage="joining the process group")
    join(spec, rank, device, directory)  # the doctor's own limit is shorter than the group's
    tell(stage="in the exchange by gloo")
    verify(torch.empty(1000 * world))
    backend, megabytes, repeats = ("NCCL", 64, 40) if on_gpu else ("gloo", 8, 8)
    tell(stage=f"in the exchange by {backend}")
    buffer = torch.empty(megabytes * 250_000 // world * world, device=device)
    verify(buffer)
    latency = exchange_seconds(buffer[:world], 5 * repeats)
    # Bus bandwidth as NCCL's tests define it: what a rank really sends, to be held against the link's own rate.
    rate = 4 * buffer.numel() * (world - 1) / world / exchange_seconds(buffer, repeats)
    tell(stage="leaving the process group")
    dist.barrier()  # a rank that leaves early breaks the others' connections
    dist.destroy_process_group()
    return {"backend": backend, "megabytes": megabytes, "rate": rate / 1e9, "latency": latency * 1e6}


def verify(buffer: torch.Tensor) -> None:
    """Exchange chunks that name sender and receiver. Overwrites `buffer` (n,) float32, n a multiple of the ranks."""
    world, rank = dist.get_world_size(), dist.get_rank()
    ranks = torch.arange(world, device=buffer.device)[:, None]
    pattern = torch.arange(buffer.numel() // world, dtype=torch.int32, device=buffer.device)[None] % _PATTERN
    buffer.copy_((pattern + rank * world + ranks).flatten())
    received = torch.empty_like(buffer)
    dist.all_to_all_single(received, buffer)
    wrong = int((received != (pattern + ranks * world + rank).flatten()).sum())
    if wrong:
        raise WrongResult(f"all-to-all gave {wrong} wrong numbers out of {buffer.numel()}")


def exchange_seconds(buffer: torch.Tensor, repeats: int) -> float:
    """Of one all-to-all, after as many that warm up."""
    received, took = torch.empty_like(buffer), 0.0
    for _ in range(2):
        dist.barrier()
        took = seconds_of(lambda: dist.all_to_all_single(received, buffer), repeats, buffer.device)
    return took


def main(check: Callable[[PoolSpec, int, Path, Tell], dict[str, Any]] = exchange) -> None:
    """Process entry. `check` lets tests put faults in."""
    rank, directory = int(os.environ["RANK"]), Path(os.environ["PARALLEL_DIT_POOL"])

    def tell(**entry: Any) -> None:
        with (directory / f"rank-{rank}.jsonl").open("a", encoding="utf-8") as file:
            file.write(json.dumps({"time": time.time(), **entry}) + "\n")

    try:
        tell(found=check(PoolSpec.parse(os.environ["PARALLEL_DIT_DEVICES"]), rank, directory, tell))
    except Exception as error:
        tell(failure=f"{type(error).__name__}: {' '.join(str(error).split())[:400]}".rstrip(": "))
        raise


if __name__ == "__main__":
    main()
