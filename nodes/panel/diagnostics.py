"""What to paste into a bug report: versions, state, ends of the logs. Nothing that is secret or names a person."""

from __future__ import annotations

import json
import platform
from importlib.metadata import PackageNotFoundError, version

from .log_tail import read_tail
from .redaction import clean
from .status import read_status

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
