"""What panel and API do with pools. Each may take long: call it in a thread."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from parallel_runtime.config import ParallelConfig
from parallel_runtime.errors import ConfigurationError

from .settings import wished_config

if TYPE_CHECKING:
    from workers.client.client import PoolClient


def start(wishes: dict[str, Any]) -> None:
    """Start the pool of `devices`, or of the default configuration. Raises ParallelError where it cannot."""
    from workers.client.pool_registry import get_pool

    devices = wishes.get("devices")
    get_pool(ParallelConfig(devices=devices) if devices else wished_config(None)).start()


def stop(wishes: dict[str, Any], again: bool = False) -> None:
    """End pools, whatever they do, and start them again, if wished, or raise ParallelError: `pool`, or all."""
    for pool in _chosen(wishes):
        pool.stop()
        if again:
            pool.start()


def release(wishes: dict[str, Any], keep: bool) -> None:
    """Take models from the devices, to keep them on the host or to forget them: those of `pool`, of `model`, or all."""
    name = wishes.get("model")
    for pool in _chosen(wishes):
        for model, held in [(model, pool.held_bytes(model)) for model, _ in pool.models]:
            if (name is None or model.path.endswith(f"/{name}")) and (held or not keep):
                pool.release(model, park=keep)
        for vae in pool.vaes:
            if name is None or vae.file.path.endswith(f"/{name}"):
                pool.release(vae)


ACTIONS: dict[str, Callable[[dict[str, Any]], None]] = {
    "start": start,
    "park": partial(release, keep=True),
    "unload": partial(release, keep=False),
    "stop": stop,
    "restart": partial(stop, again=True),
}


def _chosen(wishes: dict[str, Any]) -> list[PoolClient]:
    """The pools that are meant; ConfigurationError where there is none of that name."""
    from workers.client.pool_registry import known_pools

    name = wishes.get("pool")
    pools = [pool for pool in known_pools() if name in (None, str(pool.spec))]
    if name is not None and not pools:
        raise ConfigurationError("There is no pool {name}.", "Take a name of /parallel_dit/status.", name=repr(name))
    return pools
