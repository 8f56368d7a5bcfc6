"""Which files a model path stands for: one file, or a folder of diffusers'; and whether they were replaced."""

from __future__ import annotations

from pathlib import Path

from ..errors import CheckpointError
from .folder import find_in_folder
from .paths import expand, reading, shortened

Identity = tuple[tuple[str, int, int, int, int], ...]


def find_files(path: str | Path) -> tuple[tuple[Path, ...], Path | None]:
    """The safetensors files, in a fixed order, and the config.json of a folder; None for a single file.

    Raises:
        CheckpointError, UnsupportedModelError: nothing there; see `find_in_folder`.
    """
    path = expand(path)
    with reading(path):
        if path.is_file():
            return (path,), None
        if path.is_dir():
            return find_in_folder(path)
    what = "{shortened} does not exist."
    raise CheckpointError(what, "Check the model's path, and refresh the list of models.", shortened=shortened(path))


def identity(path: str | Path) -> Identity:
    """(file, device, inode, size in bytes, mtime in ns) of every file behind `path`: equal while none was replaced.

    Raises:
        CheckpointError, UnsupportedModelError: as `find_files`.
    """
    found = []
    weights, config = find_files(path)
    for file in weights if config is None else (config, *weights):
        with reading(file):
            status = file.stat()
        found.append((str(file.resolve()), status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns))
    return tuple(found)
