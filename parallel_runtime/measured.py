"""What was measured on this machine, kept between processes: a small JSON file for each thing, as ranks write at the
same time. Free of torch, for the doctor."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import tempfile
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

_DRIVER = Path("/proc/driver/nvidia/version")


def recall(folder: Path | None, key: str) -> Any:
    """Return what was kept under a key; None where nothing was, or it is damaged."""
    if folder is None:
        return None
    try:
        kept = json.loads(_path(folder, key).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return kept.get("measured") if isinstance(kept, dict) and kept.get("key") == key else None


def keep(folder: Path | None, key: str, measured: Any) -> None:
    """Keep JSON data under a key, everything that the numbers depend on; where the folder cannot be written, do not."""
    if folder is None:
        return
    with contextlib.suppress(OSError):
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=folder, delete=False, encoding="utf-8") as file:
            json.dump({"key": key, "measured": measured}, file, indent=1)
        os.replace(file.name, _path(folder, key))  # another process may read it at this moment


def software() -> str:
    """The software that measured speeds depend on: the driver's version and torch's."""
    try:
        driver = " ".join(_DRIVER.read_text(encoding="utf-8", errors="replace").partition("\n")[0].split())
    except OSError:  # no NVIDIA driver, or a sandbox that hides it
        driver = "unknown"
    return f"driver {driver} | torch {find_version('torch') or 'none'}"


def find_version(package: str) -> str | None:
    """Of an installed package."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _path(folder: Path, key: str) -> Path:
    return folder / f"{hashlib.sha256(key.encode()).hexdigest()[:20]}.json"
