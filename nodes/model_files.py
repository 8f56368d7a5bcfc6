"""Model files that loaders offer, where they lie, and which network runs one: ComfyUI's own a file, diffusers' class a
folder (with a slash at the end of its name)."""

from __future__ import annotations

import inspect
import os
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from parallel_runtime.errors import UnsupportedModelError
from parallel_runtime.loading.gguf_pack import SUFFIX
from parallel_runtime.said import NOTHING, Said, said

from .carried_patches import who_made

if TYPE_CHECKING:
    from parallel_runtime.loading.checkpoint import Checkpoint
    from parallel_runtime.loading.host_file import HostFile


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
    if (node := classes.get("UnetLoaderGGUF")) is None:
        raise UnsupportedModelError(
            said(
                "{path} is a GGUF file, which ComfyUI reads with the pack ComfyUI-GGUF, and that is not installed.",
                path=path,
            ),
            "Install ComfyUI-GGUF, or choose a safetensors file of this model.",
        )
    return str(Path(inspect.getfile(node)).parent)


def choose_network(path: Path, weight_dtype: str = "default") -> tuple[Checkpoint | HostFile, Said]:
    """Open a file for ComfyUI's own network, or a folder for diffusers' class.

    Returns:
        Also what the node should say of it, a sentence; "" for nothing.

    Raises:
        CheckpointError: missing or damaged files.
        UnsupportedModelError: no network runs it.
    """
    from parallel_runtime.loading.checkpoint import open_checkpoint
    from parallel_runtime.loading.host_file import open_host_file
    from parallel_runtime.networks.diffusers.package import absent, is_installed

    gguf, folder = is_gguf(path), path.is_dir()
    if weight_dtype.startswith("fp8") and (gguf or folder):
        text = "In {path} weights stay as they are: {setting} does not take them."
        raise UnsupportedModelError(
            said(text, path=path, setting=f"weight_dtype {weight_dtype}"), "Set weight_dtype to default."
        )
    if not folder:
        return _of_comfyui(open_host_file(path, find_gguf_pack(path) if gguf else ""))
    if not is_installed():
        raise absent()
    return open_checkpoint(path), NOTHING


def _of_comfyui(file: HostFile) -> tuple[HostFile, Said]:
    """A file for ComfyUI's network; refuses what ComfyUI cannot build, with its reason, and what is a node pack's own:
    no rank has its code."""
    network = file.build()
    for made in (file.config, network):
        if not type(made).__module__.startswith("comfy."):
            whose = who_made(type(made))
            raise UnsupportedModelError(
                said(
                    "{name} is a model of a node pack's own, {whose}, which the workers do not have.",
                    name=file.path.name,
                    whose=whose,
                ),
                "Load it with Load Diffusion Model, or with that pack's loader.",
            )
    why = NOTHING
    if missing := file.missing(network):
        why = said(
            "The file lacks {count} of the network's weights, first {name}: what is in their place is by chance, as "
            "with ComfyUI's own loader.",
            count=len(missing),
            name=missing[0],
        )
    return file, why
