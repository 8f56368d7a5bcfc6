"""The end of a pool's log, for the canvas and for bug reports."""

from __future__ import annotations

from pathlib import Path

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
