"""The world of a rank: its device, and the process group that all ranks of the pool are in."""

from __future__ import annotations

import datetime
from pathlib import Path

import torch
import torch.distributed as dist

from ..launch import PoolSpec

COLLECTIVE_TIMEOUT = datetime.timedelta(minutes=30)


class World:
    """This rank's way into the world.

    Args:
        spec: of the pool.
        rank, local_rank: among all ranks, and among those of this machine.
        folder: the pool's.
    """

    def __init__(self, spec: PoolSpec, rank: int, local_rank: int, folder: Path):
        self._spec = spec
        self._rank = rank
        self._folder = folder
        cpu = spec.device_type == "cpu"
        self.device = torch.device("cpu") if cpu else torch.device("cuda", spec.devices[local_rank])

    def take_device(self) -> None:
        """Be on this rank's device."""
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)
            # The context exists before DeviceMesh looks, which would choose a device itself.
            torch.zeros(1, device=self.device)

    def enter(self) -> None:
        """Join the process group; every rank of the world does. One rank alone needs none.

        Ranks of one machine meet at a file that nobody else can open; those of several at torchrun's own store.
        """
        size = self._spec.world_size
        if size == 1:
            return
        dist.init_process_group(
            backend="cpu:gloo" if self.device.type == "cpu" else "cpu:gloo,cuda:nccl",
            timeout=COLLECTIVE_TIMEOUT,
            store=dist.FileStore(str(self._folder / f"store-{size}"), size) if self._spec.hosts == 1 else None,
            rank=self._rank,
            world_size=size,
        )
