"""The pool starts with ComfyUI, unless the last session did not use it. Imports no torch: ComfyUI has not yet."""

from __future__ import annotations

import contextlib
import logging
import os
import re
import threading
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING

from parallel_runtime.config import ParallelConfig
from parallel_runtime.errors import ConfigurationError, ParallelError

from .panel.settings import START_DEVICES, read_settings

if TYPE_CHECKING:
    from workers.client.client import PoolClient
    from workers.launch import PoolSpec

VARIABLE = "PARALLEL_DIT_START"
NONE = "none"  # setting with which the first prompt starts the pool
FIRST = "auto"
_NUMBERS = re.compile(r"\d{1,3}(,\d{1,3}){0,63}")

log = logging.getLogger("parallel_dit")


def wished_devices(last: str | None) -> str | None:
    """The environment variable's devices, else the setting's, else the last session's; None for none now."""
    if (environment := os.environ.get(VARIABLE)) is not None:
        return environment or None
    setting = read_settings().get(START_DEVICES)
    devices = (setting.strip() if isinstance(setting, str) else "") or last
    return None if devices == NONE else devices


def _file() -> Path:
    """Raises ConfigurationError where there is no folder for it."""
    from workers.state_folder import state_directory

    return state_directory() / "last_devices"


def _note(devices: str) -> bool:
    """For the next session; whether that can be noted."""
    with contextlib.suppress(OSError, ConfigurationError):
        file = _file()
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(devices, encoding="ascii")
        return True
    return False


@lru_cache(maxsize=1)  # asked for at every request
def remember_devices(spec: PoolSpec) -> None:
    """Note a pool's GPUs; one over several machines is started by hand, and ranks on a CPU are for tests."""
    if spec.device_type == "cuda" and spec.hosts == 1:
        _note(",".join(map(str, spec.devices)))  # else the next first prompt starts the pool


def last_devices() -> str | None:
    """The last session's, or "auto" in the first one; None where it did not use its pool, or the file is damaged."""
    try:
        file = _file()
        text = file.read_text(encoding="ascii") if file.exists() else FIRST
    except (OSError, ValueError, ConfigurationError):
        return None
    return text if text == FIRST or _NUMBERS.fullmatch(text) else None


def take_last_devices() -> str | None:
    """`last_devices`, and note that this session has not used them yet; None where that cannot be noted."""
    devices = last_devices()
    return devices if _note("") else None


def start_early() -> None:
    """Before ComfyUI imports torch, begin with the pool's processes. What is wrong is told when the pool starts."""
    import comfy.cli_args

    from workers.client import supervisor_process
    from workers.driver import count_visible
    from workers.launch import resolve_devices

    from .comfyui_code import comfyui_code

    devices = wished_devices(None if comfy.cli_args.args.cpu else last_devices())
    if devices is None:
        return
    with contextlib.suppress(ParallelError):
        spec = resolve_devices(ParallelConfig(devices=devices), count_visible)
        if spec.device_type == "cuda" or devices.startswith("cpu"):
            supervisor_process.start_early(spec, comfyui_code(None))


def start_pool(get_pool: Callable[[ParallelConfig], PoolClient], devices: str) -> None:
    """Start a pool, by the processes that began early, and wait for it; the first prompt tells what fails again."""
    from workers.client.supervisor_process import take_early

    try:
        get_pool(ParallelConfig(devices=devices)).start()
    except ParallelError as error:
        take_early(None)
        log.warning("Parallel DiT: the pool did not start with ComfyUI. %s", error)


def start_pool_if_wished() -> None:
    """Start the pool in the background: it takes as long as ComfyUI itself does until it answers."""
    import comfy.cli_args
    import torch

    has_gpus = not comfy.cli_args.args.cpu and torch.cuda.is_available()
    devices = wished_devices(take_last_devices() if has_gpus else None)
    # Imported here: ComfyUI's own thread imports other packs meanwhile, and two threads must not.
    from workers.client.pool_registry import get_pool
    from workers.client.supervisor_process import take_early

    if devices is None:
        take_early(None)
        return
    threading.Thread(target=start_pool, args=(get_pool, devices), name="parallel-dit-start", daemon=True).start()
