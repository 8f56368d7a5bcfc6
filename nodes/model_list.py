"""Models that Parallel Loader offers, and where they lie: files, and diffusers folders with a slash at the end."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path


def is_transformer_folder(folder: str | Path) -> bool:
    """A diffusers pipeline folder with transformer/config.json (or unet/), or a transformer folder itself."""
    folder = Path(folder)
    if any((folder / name / "config.json").is_file() for name in ("transformer", "unet")):
        return True
    return (folder / "config.json").is_file() and any(folder.glob("*.safetensors*"))


def list_folders(roots: Iterable[str | Path]) -> list[str]:
    """Names of the diffusers folders below `roots`, relative to their root, sorted, each with a slash at the end."""
    names = set()
    for root in roots:
        for folder, below, _ in os.walk(root, followlinks=True):
            below[:] = [name for name in below if not _leads_back(folder, name)]
            if is_transformer_folder(folder) and folder != str(root):
                names.add(Path(folder).relative_to(root).as_posix() + "/")
                below.clear()
    return sorted(names)


def find_folder(name: str, roots: Iterable[str | Path]) -> Path | None:
    """Path of a folder that `list_folders` named, or None if it is no longer there, or no such name."""
    if Path(name).is_absolute() or ".." in Path(name).parts:  # a graph may be anybody's
        return None
    for root in roots:
        folder = Path(root) / name
        if is_transformer_folder(folder):
            return folder
    return None


def _leads_back(folder: str, name: str) -> bool:
    """Whether a folder in another one is a link to that or to one around it, where a walk would go on and on."""
    path = os.path.join(folder, name)
    return os.path.islink(path) and Path(os.path.realpath(folder)).is_relative_to(os.path.realpath(path))
