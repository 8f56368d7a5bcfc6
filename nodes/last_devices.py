"""The GPUs of the last pool that loaded a model: where the next session's starts, before its first prompt."""

from __future__ import annotations

import contextlib
import re
from functools import cache
from typing import TYPE_CHECKING

from parallel_runtime.errors import ConfigurationError

if TYPE_CHECKING:
    from workers.launch import PoolSpec

_FILE = "last_devices"
_NUMBERS = re.compile(r"\d{1,3}(,\d{1,3}){0,63}")


@cache
def remember_devices(spec: PoolSpec) -> None:
    """Note a pool's GPUs; one over several machines is started by hand, and ranks on a CPU are for tests."""
    from workers.launch import state_directory

    if spec.device_type != "cuda" or spec.hosts > 1:
        return
    with contextlib.suppress(OSError, ConfigurationError):  # then the next first prompt starts the pool
        folder = state_directory()
        folder.mkdir(parents=True, exist_ok=True)
        (folder / _FILE).write_text(",".join(map(str, spec.devices)), encoding="ascii")


def last_devices() -> str | None:
    """As Parallel Config has them; None where nothing was noted, or the file holds something else."""
    from workers.launch import state_directory

    try:
        text = (state_directory() / _FILE).read_text(encoding="ascii")
    except (OSError, ValueError, ConfigurationError):
        return None
    return text if _NUMBERS.fullmatch(text) else None
