"""The folder of what torch.compile made, which outlives pools: kept from growing without end."""

from __future__ import annotations

from pathlib import Path

MOST_BYTES = 4 << 30
"""Graphs and kernels of a family, dtype and split take tens of megabytes."""


def prune(folder: Path, most_bytes: int = MOST_BYTES) -> int:
    """Remove the files that were not used for the longest time, until the rest takes no more than `most_bytes`.

    What is gone is compiled again when it is needed; PyTorch and Triton look for every file that they name.

    Returns:
        Bytes that were removed.
    """
    files = []
    for path in folder.rglob("*"):
        try:
            if path.is_file():
                known = path.stat()
                files.append((max(known.st_atime, known.st_mtime), known.st_size, path))
        except OSError:  # another pool's process removed or replaced it just now
            continue
    excess = sum(size for _, size, _ in files) - most_bytes
    removed = 0
    for _, size, path in sorted(files):
        if removed >= excess:
            break
        try:
            path.unlink()
        except OSError:
            continue
        removed += size
    return removed
