"""The GPUs of the last session's pool: where the next one's starts, before its first prompt."""

from __future__ import annotations

import contextlib
import re
from functools import lru_cache
from typing import TYPE_CHECKING

from parallel_runtime.errors import ConfigurationError

if TYPE_CHECKING:
    from workers.launch import PoolSpec

FIRST = "auto"
_FILE = "last_devices"
_NUMBERS = re.compile(r"\d{1,3}(,\d{1,3}){0,63}")


@lru_cache(maxsize=1)  # asked for at every request
def remember_devices(spec: PoolSpec) -> None:
    """Note a pool's GPUs; one over several machines is started by hand, and ranks on a CPU are for tests."""
    from workers.launch import state_directory

    if spec.device_type != "cuda" or spec.hosts > 1:
        return
    with contextlib.suppress(OSError, ConfigurationError):  # then the next first prompt starts the pool
        folder = state_directory()
        folder.mkdir(parents=True, exist_ok=True)
        (folder / _FILE).write_text(",".join(map(str, spec.devices)), encoding="ascii")


def take_last_devices() -> str | None:
    """Where a pool starts together with ComfyUI, and note that this session has not used it yet.

    Returns:
        Devices as Parallel Config has them: the last session's, or "auto" in the first one after the pack was
        installed. None where the last session did not use its pool, or the file holds something else.
    """
    from workers.launch import state_directory

    try:
        file = state_directory() / _FILE
        text = file.read_text(encoding="ascii") if file.exists() else FIRST
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text("", encoding="ascii")
    except (OSError, ValueError, ConfigurationError):
        return None
    return text if text == FIRST or _NUMBERS.fullmatch(text) else None
