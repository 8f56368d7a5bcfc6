"""The world of a rank: its device, and the process group that all ranks of the pool are in."""

from __future__ import annotations

import datetime
import os
from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed as dist

from parallel_runtime.mesh.groups import begin_names

from ..hosts.store import open_store
from ..launch import PoolSpec, tell_world, threads_of_rank

COLLECTIVE_TIMEOUT = datetime.timedelta(minutes=30)


class World:
    """This rank's way into the world, and from one into a larger one.

    Args:
        spec: of the ranks that this one is started to meet.
        rank, local_rank: among all ranks, and among those of this host.
        folder: the pool's, on this host.
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
        """Join the process group; every rank of the world does. One rank alone needs none."""
        if self._spec.world_size == 1:
            return
        dist.init_process_group(
            backend="cpu:gloo" if self.device.type == "cpu" else "cpu:gloo,cuda:nccl",
            timeout=COLLECTIVE_TIMEOUT,
            store=open_store(self._spec, self._folder, self._rank),
            rank=self._rank,
            world_size=self._spec.world_size,
        )

    def enter_larger(self, devices: tuple[int, ...], first_name: int) -> None:
        """Leave the process group, and join that of a larger world; every rank of that one does.

        Args:
            devices: of all its ranks.
            first_name: see `begin_names`.
        """
        if dist.is_initialized():
            dist.destroy_process_group()
        begin_names(first_name)
        self._spec = replace(self._spec, devices=devices)
        tell_world(self._spec, os.environ)
        torch.set_num_threads(threads_of_rank(self._spec, os.environ))
        self.enter()
