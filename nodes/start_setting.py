"""The wish to start the pool together with ComfyUI, instead of at the first prompt."""

from __future__ import annotations

import logging
import os
import threading
from pathlib import Path

from parallel_runtime.config import ParallelConfig
from parallel_runtime.errors import ParallelError

from .panel.settings import START_DEVICES, read_settings, settings_file

VARIABLE = "PARALLEL_DIT_START"

log = logging.getLogger("parallel_dit")


def wished_devices(file: Path, environment: str | None) -> str | None:
    """Devices to start a pool on: the environment variable's, else the canvas setting's; None or "" means none.

    The settings file is the user's and may hold anything; what is no text is ignored.
    """
    if environment is not None:
        return environment or None
    devices = read_settings(file).get(START_DEVICES)
    return devices if isinstance(devices, str) and devices else None


def start_pool(devices: str) -> None:
    """Start a pool on `devices`, wait for it, and have it import ComfyUI's code; what fails is logged, the first prompt
    will tell it again."""
    from workers.client.pool_registry import get_pool

    try:
        pool = get_pool(ParallelConfig(devices=devices))
        pool.start()
    except ParallelError as error:
        log.warning("Parallel DiT: the pool did not start with ComfyUI. %s", error)
        return
    from .comfyui_code import comfyui_code

    pool.expect_comfyui(comfyui_code(None))


def start_pool_if_wished() -> None:
    """Start the pool in the background if the environment or ComfyUI's settings ask for it."""
    devices = wished_devices(settings_file(), os.environ.get(VARIABLE))
    if devices is not None:
        threading.Thread(target=start_pool, args=(devices,), name="parallel-dit-start", daemon=True).start()
