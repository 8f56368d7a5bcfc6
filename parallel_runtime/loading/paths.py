"""Paths of files that are read, and what is said of one that cannot be."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

from ..errors import CheckpointError

_LONGEST_SHOWN = 300


@contextlib.contextmanager
def reading(path: Path) -> Iterator[None]:
    """Inside, a file is read: where the system says that it cannot be, that is a CheckpointError."""
    try:
        yield
    except OSError as error:
        what = "{path} cannot be read: {strerror}."
        fix = "Check the path, the rights of the file, and the disk."
        raise CheckpointError(what, fix, path=shortened(path), strerror=error.strerror) from error


def expand(path: str | Path) -> Path:
    """The path with the home folder in place of a tilde.

    Raises:
        CheckpointError: there is no such home, or the name cannot travel, as it is not UTF-8.
    """
    try:
        expanded = Path(path).expanduser()
        str(expanded).encode("utf-8")
    except RuntimeError as error:
        what = "{shortened} does not exist."
        raise CheckpointError(what, "Write the path in full.", shortened=shortened(Path(path))) from error
    except UnicodeEncodeError as error:
        fix = "Rename the file or folder, and refresh the list of models."
        raise CheckpointError("The name {shortened} is not UTF-8.", fix, shortened=shortened(Path(path))) from error
    return expanded


def shortened(path: Path) -> str:
    """As it is shown."""
    text = str(path).encode("ascii" if not str(path).isprintable() else "utf-8", "backslashreplace").decode()
    return text if len(text) < _LONGEST_SHOWN else f"{text[:_LONGEST_SHOWN]}..."
