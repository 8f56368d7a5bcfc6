"""What each rank runs of the test of a host with memory for one model that streams from it, and not for two."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import psutil
import torch
import torch.distributed as dist

from parallel_runtime import memory
from parallel_runtime.errors import OutOfMemoryError
from parallel_runtime.requests.requests import Forward
from tests.parallel_runtime.staged_run import Quiet
from tests.parallel_runtime.streamed_run import PoolRank, flux_tensors, forward


def bytes_of_shares(processes: list[int]) -> int:
    """That all shares of these processes have of the host's memory, each as long as any of them has it open."""
    found: dict[int, int] = {}
    for process in processes:
        for descriptor in Path(f"/proc/{process}/fd").iterdir():
            try:
                if "parallel-dit-share" in os.readlink(descriptor):
                    stat = descriptor.stat()
                    found[stat.st_ino] = stat.st_blocks * 512
            except OSError:
                continue  # closed meanwhile
    return sum(found.values())


def compare(rank: int, world_size: int, path: str, other: str, folder: str) -> dict[str, Any]:
    """Two models in turn, each of which takes the memory of the other."""
    processes: list[Any] = [None] * world_size
    dist.all_gather_object(processes, os.getpid())
    pool = PoolRank(rank, world_size, folder)
    files, expected = {"a": path, "b": other}, {}
    for name, file in files.items():
        pool.load(f"whole {name}", file, weights="whole")
        expected[name] = forward(pool, f"whole {name}")
    pool.load("a", path, weights="host")
    found = {"a": torch.equal(forward(pool, "a"), expected["a"])}
    one = bytes_of_shares(processes)
    found["counted"] = one > 0.9 * sum(pool.weights("a").shared.sizes)
    found["one copy"] = one < 1.1 * sum(pool.weights("a").shared.sizes)
    room = one * 3 // 2

    def host() -> Any:
        return SimpleNamespace(available=room - bytes_of_shares(processes), total=room)

    dist.barrier()
    with patch.object(psutil, "virtual_memory", host), patch.object(memory, "free_bytes", lambda device: 1 << 40):
        pool.load("b", other, weights="host")
        for name in ("b", "a", "a", "b"):
            found[f"{name} in turn"] = torch.equal(forward(pool, name), expected[name])
            found[f"{name} alone"] = [pool.weights(each).here for each in files] == [name == each for each in files]
        dist.barrier()
        found["no more than there is"] = bytes_of_shares(processes) < room
        dist.barrier()
        room = one // 2
        try:
            pool.engine.prepare(Forward("a", flux_tensors()[0]), {}, Quiet())
            found["refused"] = False
        except OutOfMemoryError as error:
            found["refused"] = "of the host's memory" in error.cause
        found["nothing half"] = not pool.weights("a").here
        dist.barrier()
        room = one * 3 // 2
        found["a afterwards"] = torch.equal(forward(pool, "a"), expected["a"])
        return found | _alone(pool, expected["a"], one, processes)


def _alone(pool: PoolRank, expected: torch.Tensor, one: int, processes: list[int]) -> dict[str, bool]:
    """A rank that alone lets its share go has the memory when the others come to the next request."""
    dist.barrier()
    before = bytes_of_shares(processes)
    dist.barrier()
    if pool.engine.rank == 0:
        held = pool.engine.residency.get("a").loaded_model
        assert held is not None
        held.give_back()
    dist.barrier()
    pool.engine.residency.get("a").store.make_way(None)
    dist.barrier()
    found = {"freed": bytes_of_shares(processes) < before - one // (2 * pool.ranks)}
    dist.barrier()
    found["back"] = torch.equal(forward(pool, "a"), expected)
    return found
