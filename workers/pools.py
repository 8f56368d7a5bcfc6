"""The pools of this process, by their devices."""

from __future__ import annotations

import atexit
import os
import threading

import torch

from parallel_runtime.config import ParallelConfig

from .client import PoolClient
from .launch import PoolSpec, resolve_devices
from .network import read_network

EXIT_SECONDS = 5.0


class _Pools:
    """The process's pools. A GPU belongs to one pool: a pool that another one needs the GPUs of is closed."""

    def __init__(self) -> None:
        self._clients: list[PoolClient] = []
        self._lock = threading.Lock()

    def get(self, spec: PoolSpec) -> PoolClient:
        with self._lock:
            for client in self._clients:
                # A configuration that wants the first ranks of a larger pool takes part of it: nothing restarts.
                if _holds(client.spec, spec):
                    return client
            for client in [c for c in self._clients if _overlap(c.spec, spec)]:
                client.close()
                self._clients.remove(client)
            client = PoolClient(spec)
            self._clients.append(client)
            return client

    def end(self) -> None:
        """At the end of the process, when another thread may be in the middle of anything: no lock is taken."""
        for client in list(self._clients):
            client.end(EXIT_SECONDS)

    def close(self) -> None:
        with self._lock:
            for client in self._clients:
                client.close()
            self._clients.clear()


def _holds(larger: PoolSpec, spec: PoolSpec) -> bool:
    if larger.hosts != spec.hosts or larger.device_type != spec.device_type:
        return False
    # Over several hosts the first ranks are all on the first one, so that a part of such a pool is another thing.
    return larger == spec or (spec.hosts == 1 and larger.devices[: len(spec.devices)] == spec.devices)


def _overlap(one: PoolSpec, other: PoolSpec) -> bool:
    return one.device_type == other.device_type and bool(set(one.devices) & set(other.devices))


_pools = _Pools()  # processes are a resource of this process, so they are kept per process
atexit.register(_pools.end)


def get_pool(config: ParallelConfig) -> PoolClient:
    """The pool for a configuration's devices; not started yet.

    Raises:
        ConfigurationError: devices that do not exist, or too few for the degrees.
    """
    if config.hosts > 1:
        read_network(os.environ)  # a missing setting is an error of the configuration, not of a pool that started
    return _pools.get(resolve_devices(config, torch.cuda.device_count))


def close_pools() -> None:
    """End every pool of this process."""
    _pools.close()
