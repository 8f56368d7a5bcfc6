"""What outlives a pool: its log, which is rotating, and never a reason for the pool to fail, and compiled kernels."""

from __future__ import annotations

import contextlib
import os
import time
from collections import deque
from io import TextIOWrapper
from logging import LogRecord
from logging.handlers import RotatingFileHandler
from pathlib import Path
from typing import IO

from parallel_runtime.errors import ConfigurationError
from parallel_runtime.said import Said, said

_MOST_COMPILED_BYTES = 4 << 30  # graphs and kernels of a family, dtype and split take tens of megabytes
_TAIL_LINES = 40
_ROTATE_BYTES = 4 << 20
_ROTATED = 2
_KEPT_POOLS = 20
_TAIL_BYTES = 64 << 10


def state_directory() -> Path:
    """Folder of what outlives a pool: logs, compiled kernels; ConfigurationError where this user has no home."""
    try:
        return Path(os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state") / "parallel-dit"
    except RuntimeError as error:
        what = "The user {getuid} that ComfyUI runs as has no home folder."
        fix = "Set the environment variable HOME to a folder that this user can write."
        raise ConfigurationError(what, fix, getuid=os.getuid()) from error


def prune_compiled(folder: Path, most_bytes: int = _MOST_COMPILED_BYTES) -> None:
    """Of what torch.compile made, remove what was not used for the longest time, until the rest takes no more than
    `most_bytes`. What is gone is compiled again: PyTorch and Triton look for every file that they name."""
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


def log_directory() -> Path:
    """Folder of the pools' logs. $PARALLEL_DIT_LOGS overrides it."""
    return Path(os.environ.get("PARALLEL_DIT_LOGS") or state_directory() / "logs")


def _open_own(path: str, flags: int) -> int:
    """For this user alone to write, whatever the umask: what others had written would be read as the pool's."""
    return os.open(path, flags, 0o644)


class _OwnFile(RotatingFileHandler):
    """Its files are made by `_open_own`."""

    def _open(self) -> TextIOWrapper:
        return open(self.baseFilename, self.mode, encoding=self.encoding, opener=_open_own)  # type: ignore[return-value]


class PoolLog:
    """Writes lines with a time stamp, and remembers the last ones for error reports."""

    def __init__(self, path: Path):
        self.path = path
        # Neither a full disk nor a folder that is not there may end the pool: the last lines are kept in memory.
        self._handler = _OwnFile(path, maxBytes=_ROTATE_BYTES, backupCount=_ROTATED, encoding="utf-8", delay=True)
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


def begin_log(path: Path) -> IO[bytes] | None:
    """Make a pool's log before anything of the pool runs, for what its supervisor says where it cannot start; prune the
    logs of earlier pools. None where no file can be written."""
    try:
        path.parent.mkdir(mode=0o755, parents=True, exist_ok=True)
        log = open(path, "ab", opener=_open_own)  # noqa: SIM115 - its caller closes it
    except OSError:
        return None
    _prune(path.parent)
    return log


def tell_of_fresh_pool(path: Path, with_stacks: bool = False) -> Said:
    """What comes after a pool's end, and where to read more, `with_stacks` or without; no file that is not there."""
    if not path.exists():
        return said("The next prompt starts fresh workers; no log could be written in {folder}.", folder=path.parent)
    template = "The next prompt starts fresh workers; the log is {log}."
    if with_stacks:
        template = "The next prompt starts fresh workers; the log with the stacks of all workers is {log}."
    return said(template, log=path)


def read_tail(path: Path) -> str:
    """Whole lines from a log's end; "" where it cannot be read."""
    try:
        with path.open("rb") as log:
            size = log.seek(0, 2)
            log.seek(max(0, size - _TAIL_BYTES))
            text = log.read().decode(errors="replace")
    except OSError:
        return ""
    return text if size <= _TAIL_BYTES else text.partition("\n")[2]


def read_newest(folder: Path) -> str:
    """`read_tail` of the log that was written last; "" where there is none."""
    try:
        newest = max(folder.glob("*.log"), key=lambda path: path.stat().st_mtime, default=None)
    except OSError:  # one was removed meanwhile
        return ""
    return read_tail(newest) if newest is not None else ""


def last_line(path: Path) -> str:
    """What the log says last, "" where it says nothing or cannot be read."""
    return next((line.strip() for line in reversed(read_tail(path).split("\n")) if line.strip()), "")


def _prune(folder: Path) -> None:
    """Keep the logs that were written last."""
    written: list[tuple[float, Path]] = []
    for log in folder.glob("pool-*.log"):
        with contextlib.suppress(OSError):  # another process prunes too
            written.append((log.stat().st_mtime, log))
    for _, log in sorted(written)[:-_KEPT_POOLS]:
        for file in (log, *(log.with_name(f"{log.name}.{number}") for number in range(1, _ROTATED + 1))):
            with contextlib.suppress(OSError):
                file.unlink()
