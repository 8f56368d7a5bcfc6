"""What goes on all the time: the log's level, and models and pools that leave the GPUs when nobody uses them."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from parallel_runtime.errors import ParallelError

from .settings import LOG_LEVEL, LOG_LEVELS, PARK_MINUTES, read_settings

if TYPE_CHECKING:
    from workers.client.client import ModelRequest, VaeRequest

SECONDS = 5.0
UNUSED_SECONDS = 600.0
"""After so long, a pool that has run nothing since it started ends: its processes have memory on each GPU."""

log = logging.getLogger("parallel_dit")


def log_level(settings: Mapping[str, Any]) -> int:
    """Of our lines in ComfyUI's log; where nothing was chosen, ComfyUI's own."""
    wished = settings.get(LOG_LEVEL)
    return LOG_LEVELS.get(wished, logging.NOTSET) if isinstance(wished, str) else logging.NOTSET


def park_seconds(settings: Mapping[str, Any]) -> float:
    """After so long without a prompt, models leave the GPUs; 0: never."""
    minutes = settings.get(PARK_MINUTES, 0)
    return 60.0 * minutes if isinstance(minutes, int | float) and minutes > 0 else 0.0


def park_idle(seconds: float) -> None:
    """Park the models of pools that nobody has used for so long."""
    from workers.client.pool_registry import known_pools

    for pool in known_pools():
        if pool.idle_seconds < seconds:
            continue
        unused: list[ModelRequest | VaeRequest] = [model.request for model in pool.models if model.bytes]
        for each in unused + pool.vaes:
            log.info("Parallel DiT: %s has not been used, and leaves the GPUs.", each.path)
            try:
                pool.release(each, park=True)
            except ParallelError as error:
                log.info("Parallel DiT: %s", error)


def end_unused() -> None:
    """End pools that started ahead of a prompt which has not come."""
    from workers.client.pool_registry import known_pools

    for pool in known_pools():
        if pool.idle_seconds >= UNUSED_SECONDS and pool.close_unused(UNUSED_SECONDS):
            log.info("Parallel DiT: the pool on %s has not been used, and ends; a prompt starts it again.", pool.spec)


def keep_house() -> None:
    """Start the thread that looks at the settings every few seconds."""

    def run() -> None:
        while True:
            settings = read_settings()
            log.setLevel(log_level(settings))
            if (seconds := park_seconds(settings)) > 0:
                park_idle(seconds)
            end_unused()
            time.sleep(SECONDS)

    threading.Thread(target=run, name="parallel-dit-settings", daemon=True).start()
