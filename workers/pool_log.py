"""The log file of one pool: rotating, and never a reason for the pool to fail."""

from __future__ import annotations

import contextlib
import time
from collections import deque
from logging import LogRecord
from logging.handlers import RotatingFileHandler
from pathlib import Path

_TAIL_LINES = 40
_ROTATE_BYTES = 4 << 20


class PoolLog:
    """Writes lines with a time stamp, and remembers the last ones for error reports."""

    def __init__(self, path: Path):
        self.path = path
        # Neither a full disk nor a folder that cannot be made may end the pool: the last lines are kept in memory.
        with contextlib.suppress(OSError):
            path.parent.mkdir(parents=True, exist_ok=True)
        self._handler = RotatingFileHandler(path, maxBytes=_ROTATE_BYTES, backupCount=2, encoding="utf-8", delay=True)
        self._handler.handleError = lambda record: None  # type: ignore[method-assign]
        self._lines: deque[str] = deque(maxlen=_TAIL_LINES)

    def write(self, text: str) -> None:
        """Append; each line gets the time."""
        stamp = time.strftime("%Y-%m-%d %H:%M:%S")
        for line in text.splitlines():
            self._lines.append(line)
            self._handler.handle(LogRecord("pool", 20, "", 0, f"{stamp} {line}", None, None))

    def tail(self) -> str:
        """The last lines."""
        return "\n".join(self._lines)
