"""Paths of files that are read, and what is said of one that cannot be."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

from ..errors import CheckpointError
from ..said import said

_LONGEST_SHOWN = 300


@contextlib.contextmanager
def reading(path: Path) -> Iterator[None]:
    """Inside, a file is read: where the system says that it cannot be, that is a CheckpointError."""
    try:
        yield
    except OSError as error:
        what = said("{path} cannot be read: {strerror}.", path=shortened(path), strerror=error.strerror)
        raise CheckpointError(what, "Check the path, the rights of the file, and the disk.") from error


def expand(path: str | Path) -> Path:
    """The path with the home folder in place of a tilde.

    Raises:
        CheckpointError: there is no such home, or the name cannot travel, as it is not UTF-8.
    """
    try:
        expanded = Path(path).expanduser()
        str(expanded).encode("utf-8")
    except RuntimeError as error:
        what = said("{shortened} does not exist.", shortened=shortened(Path(path)))
        raise CheckpointError(what, "Write the path in full.") from error
    except UnicodeEncodeError as error:
        what = said("The name {shortened} is not UTF-8.", shortened=shortened(Path(path)))
        raise CheckpointError(what, "Rename the file or folder, and refresh the list of models.") from error
    return expanded


def shortened(path: Path) -> str:
    """As it is shown."""
    text = str(path).encode("ascii" if not str(path).isprintable() else "utf-8", "backslashreplace").decode()
    return text if len(text) < _LONGEST_SHOWN else f"{text[:_LONGEST_SHOWN]}..."
