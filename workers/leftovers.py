"""Private folders of pools: made, owned, and removed again, also those of a client that was killed."""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
from pathlib import Path

import psutil

_PREFIX = "parallel-dit-"
_OWNER = "owner"


def make_directory() -> Path:
    """A fresh folder of mode 0700 that says which process it belongs to."""
    directory = Path(tempfile.mkdtemp(prefix=_PREFIX))
    process = psutil.Process()
    (directory / _OWNER).write_text(f"{process.pid} {process.create_time()}")
    return directory


def remove_leftovers() -> list[Path]:
    """Remove folders of this user whose owner is dead; return them. Those of living processes stay."""
    removed = []
    for directory in Path(tempfile.gettempdir()).glob(f"{_PREFIX}*"):
        with contextlib.suppress(OSError, ValueError):
            if directory.stat().st_uid != os.getuid() or directory.is_symlink():
                continue
            pid, created = (directory / _OWNER).read_text().split()
            if not _lives(int(pid), float(created)):
                shutil.rmtree(directory, ignore_errors=True)
                removed.append(directory)
    return removed


def _lives(pid: int, created: float) -> bool:
    """The create time tells the owner from a later process with its number."""
    try:
        return abs(psutil.Process(pid).create_time() - created) < 1.0
    except psutil.NoSuchProcess:
        return False
