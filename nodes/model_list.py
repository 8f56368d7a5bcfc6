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
            if is_transformer_folder(folder) and folder != str(root):
                names.add(Path(folder).relative_to(root).as_posix() + "/")
                below.clear()
    return sorted(names)


def find_folder(name: str, roots: Iterable[str | Path]) -> Path | None:
    """Path of a folder that `list_folders` named, or None if it is no longer there."""
    for root in roots:
        folder = Path(root) / name
        if is_transformer_folder(folder):
            return folder
    return None
