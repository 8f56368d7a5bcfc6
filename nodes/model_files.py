"""Model files that loaders offer, and where they lie: GGUF files, and diffusers folders with a slash at the end."""

from __future__ import annotations

import inspect
import os
import sys
from collections.abc import Iterable
from pathlib import Path

from parallel_runtime.errors import UnsupportedModelError
from parallel_runtime.loading.gguf_pack import SUFFIX
from parallel_runtime.said import said


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


_PACKS_NODE = "UnetLoaderGGUF"


def is_gguf(path: Path) -> bool:
    """By its name, as for the pack."""
    return path.suffix.lower() == SUFFIX


def list_gguf_files(roots: Iterable[str | Path]) -> list[str]:
    """Names relative to their root, sorted; also where no pack reads them, so that the node can say so."""
    return sorted(
        {
            Path(folder, name).relative_to(root).as_posix()
            for root in roots
            for folder, _, names in os.walk(root, followlinks=True)
            for name in names
            if is_gguf(Path(name))
        }
    )


def find_gguf_pack(path: Path) -> str:
    """The folder of ComfyUI-GGUF, as it runs in this ComfyUI.

    Args:
        path: of the file that it is wanted for.

    Raises:
        UnsupportedModelError: ComfyUI has no such pack.
    """
    # ComfyUI's own module of that name, and not this package.
    classes = getattr(sys.modules.get("nodes"), "NODE_CLASS_MAPPINGS", {})
    if (node := classes.get(_PACKS_NODE)) is None:
        raise UnsupportedModelError(
            said(
                "{path} is a GGUF file, which ComfyUI reads with the pack ComfyUI-GGUF, and that is not installed.",
                path=path,
            ),
            "Install ComfyUI-GGUF, or choose a safetensors file of this model.",
        )
    return str(Path(inspect.getfile(node)).parent)
