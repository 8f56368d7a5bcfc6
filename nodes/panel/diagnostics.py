"""For bug reports and the panel: versions, state, ends of the logs. Nothing that is secret or names a person."""

from __future__ import annotations

import json
import platform
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from .status import clean, read_status

_BYTES = 32 << 10


def read_tail(log: Path) -> str:
    """Whole lines from its end; "" where it cannot be read."""
    try:
        with log.open("rb") as file:
            size = file.seek(0, 2)
            file.seek(max(0, size - _BYTES))
            text = file.read().decode(errors="replace")
    except OSError:
        return ""
    return text if size <= _BYTES else text.partition("\n")[2]


def read_newest(folder: Path) -> str:
    """`read_tail` of the log that was written last; "" where there is none."""
    try:
        newest = max(folder.glob("*.log"), key=lambda path: path.stat().st_mtime, default=None)
    except OSError:  # one was removed meanwhile
        return ""
    return read_tail(newest) if newest is not None else ""


PACKAGES = ("torch", "diffusers", "safetensors", "msgspec", "nvidia-ml-py", "comfyui-frontend-package")
_LINES = 60


def write_diagnostics() -> str:
    """The text."""
    from workers.client.pool_registry import known_pools

    lines = ["Parallel DiT diagnostics", f"Python {platform.python_version()}, {platform.platform()}"]
    lines += [f"{name} {_version(name)}" for name in PACKAGES]
    status = read_status()
    for run in status["runs"][:3]:
        lines.append(f"ran: {run['model']}, latent {run['latent']}, {run['plan']} {run['step_seconds']} s per step")
    lines += ["", json.dumps({**status, "runs": [], "timeline": []}, indent=1)]
    for pool in known_pools():
        if pool.pool is not None:
            lines += ["", f"last lines of {pool.pool.log.name}:", *read_tail(pool.pool.log).splitlines()[-_LINES:]]
    return clean("\n".join(lines))


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "is missing"
