"""The folder of what torch.compile made, which outlives pools: kept from growing without end."""

from __future__ import annotations

import contextlib
from pathlib import Path

MOST_BYTES = 4 << 30
"""Graphs and kernels of a family, dtype and split take tens of megabytes."""


def prune(folder: Path, most_bytes: int = MOST_BYTES) -> None:
    """Remove the files that were not used for the longest time, until the rest takes no more than `most_bytes`. What is
    gone is compiled again: PyTorch and Triton look for every file that they name."""
    files = []
    for path in folder.rglob("*"):
        with contextlib.suppress(OSError):  # another pool's process removed or replaced it just now
            if path.is_file():
                known = path.stat()
                files.append((max(known.st_atime, known.st_mtime), known.st_size, path))
    excess = sum(size for _, size, _ in files) - most_bytes
    for _, size, path in sorted(files):
        if excess <= 0:
            break
        with contextlib.suppress(OSError):
            path.unlink()
            excess -= size
