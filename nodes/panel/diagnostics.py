"""For bug reports and the panel: versions, state, ends of the logs. Nothing that is secret or names a person."""

from __future__ import annotations

import json
import platform
from pathlib import Path

from parallel_runtime.measured import find_version
from workers.pool_log import read_tail

from .status import clean, read_status


def read_newest(folder: Path) -> str:
    """`read_tail` of the log that was written last; "" where there is none."""
    try:
        newest = max(folder.glob("*.log"), key=lambda path: path.stat().st_mtime, default=None)
    except OSError:  # one was removed meanwhile
        return ""
    return read_tail(newest) if newest is not None else ""


PACKAGES = ("torch", "safetensors", "msgspec", "nvidia-ml-py", "comfyui-frontend-package")
_LINES = 60


def write_diagnostics() -> str:
    """The text."""
    from workers.client.pool_registry import known_pools

    lines = ["Parallel DiT diagnostics", f"Python {platform.python_version()}, {platform.platform()}"]
    lines += [f"{name} {find_version(name) or 'is missing'}" for name in PACKAGES]
    status = read_status()
    for run in status["runs"][:3]:
        lines.append(f"ran: {run['model']}, latent {run['latent']}, {run['plan']} {run['step_seconds']} s per step")
    lines += ["", json.dumps({**status, "runs": [], "timeline": []}, indent=1)]
    for pool in known_pools():
        if pool.pool is not None:
            lines += ["", f"last lines of {pool.pool.log.name}:", *read_tail(pool.pool.log).splitlines()[-_LINES:]]
    return clean("\n".join(lines))
