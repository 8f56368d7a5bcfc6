"""The pools of this process, by their devices."""

from __future__ import annotations

import atexit
import logging
import os
import threading
import time

import torch

from parallel_runtime.config import ParallelConfig
from parallel_runtime.errors import PoolError
from parallel_runtime.said import said

from ..launch import PoolSpec, read_meeting, resolve_devices
from .client import PoolClient

EXIT_SECONDS = 5.0
LOOK_SECONDS = 5.0
UNUSED_SECONDS = 600.0
"""After so long, a pool that has run nothing since it started ends: its processes have memory on each GPU."""

log = logging.getLogger("parallel_dit")


class PoolRegistry:
    """The process's pools. A GPU belongs to one pool; one of which another pool needs a GPU is closed."""

    def __init__(self) -> None:
        self.clients: list[PoolClient] = []
        self._lock = threading.Lock()

    def get(self, spec: PoolSpec) -> PoolClient:
        with self._lock:
            for client in self.clients:
                # A configuration that wants the first ranks of a larger pool takes part of it: nothing restarts.
                if client.spec.holds(spec):
                    return client
            if spec.hosts > 1:
                read_meeting(os.environ)  # what is missing is an error of the configuration, not of a pool that started
            for client in self.in_the_way(spec):
                log.warning(
                    "Parallel DiT: the pool on %s ends, as another one needs its devices: %s. Loaders that are used in "
                    "turn keep their models where the devices of the first that runs begin with those of the other.",
                    client.spec,
                    spec,
                )
                taken = said("Other workers have taken devices of {spec}.", spec=client.spec)
                client.close(PoolError(taken, "Queue the prompt again."))
                self.clients.remove(client)
            client = PoolClient(spec)
            self.clients.append(client)
            return client

    def in_the_way(self, spec: PoolSpec) -> list[PoolClient]:
        """Those that end where one on these devices is asked for."""
        if any(client.spec.holds(spec) for client in self.clients):
            return []
        return [client for client in self.clients if client.spec.overlaps(spec)]

    def end(self) -> None:
        """At the end of the process, when another thread may be in the middle of anything: no lock is taken."""
        for client in list(self.clients):
            client.keeper.end(EXIT_SECONDS)


_registry = PoolRegistry()  # processes are a resource of this process, so they are kept per process
atexit.register(_registry.end)


def get_pool(config: ParallelConfig) -> PoolClient:
    """The pool for a configuration's devices, not started yet; ConfigurationError where there are no such devices."""
    return _registry.get(resolve_devices(config, torch.cuda.device_count))


def devices_in_the_way(spec: PoolSpec) -> list[PoolSpec]:
    """Devices of the pools that run now and end where one on these devices is asked for."""
    return [client.spec for client in _registry.in_the_way(spec) if client.pool is not None]


def known_pools() -> list[PoolClient]:
    """The pools of this process, running or not."""
    return list(_registry.clients)


def end_unused() -> None:
    """For a thread: end pools which started ahead of a prompt that has not come."""
    while True:
        for pool in known_pools():
            if pool.keeper.idle_seconds >= UNUSED_SECONDS and pool.close_unused(UNUSED_SECONDS):
                text = "Parallel DiT: the pool on %s has not been used, and ends; a prompt starts it again."
                log.info(text, pool.spec)
        time.sleep(LOOK_SECONDS)
