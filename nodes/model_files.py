"""Model files that loaders offer beside those that ComfyUI lists, and what ComfyUI makes of one."""

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
    from parallel_runtime.loading.host_file import HostFile


def is_gguf(path: Path) -> bool:
    """By its name, as for the pack."""
    return path.suffix.lower() == SUFFIX


def list_gguf_files(roots: Iterable[str | Path]) -> list[str]:
    """Names relative to their root, sorted; also where no pack reads them, so that the node can say so."""
    found: set[str] = set()
    for root in roots:
        for folder, _, names in os.walk(root, followlinks=True):
            files = (Path(folder, name) for name in names)
            found.update(file.relative_to(root).as_posix() for file in files if is_gguf(file))
    return sorted(found)


def find_gguf_pack(path: Path) -> str:
    """The folder of ComfyUI-GGUF, as it runs in this ComfyUI; UnsupportedModelError of this file without one."""
    # ComfyUI's own module of that name, and not this package.
    classes = getattr(sys.modules.get("nodes"), "NODE_CLASS_MAPPINGS", {})
    if (node := classes.get("UnetLoaderGGUF")) is None:
        text = "{path} is a GGUF file, which ComfyUI reads with the pack ComfyUI-GGUF, and that is not installed."
        fix = "Install ComfyUI-GGUF, or choose a safetensors file of this model."
        raise UnsupportedModelError(text, fix, path=path)
    return str(Path(inspect.getfile(node)).parent)


def open_model_file(path: Path, weight_dtype: str = "default") -> tuple[HostFile, Said]:
    """Have ComfyUI recognise a file, and say what the node should say of it, a sentence or "". CheckpointError where it
    is damaged or missing, UnsupportedModelError where ComfyUI builds it not at all, or by code of a node pack's own."""
    from parallel_runtime.loading.host_file import open_host_file

    gguf = is_gguf(path)
    if gguf and weight_dtype.startswith("fp8"):
        text = "In {path} weights stay as they are: {setting} does not take them."
        fix = "Set weight_dtype to default."
        raise UnsupportedModelError(text, fix, path=path, setting=f"weight_dtype {weight_dtype}")
    file = open_host_file(path, find_gguf_pack(path) if gguf else "")
    network = file.build()
    for made in (file.config, network):
        if not type(made).__module__.startswith("comfy."):
            text = "{name} is a model of a node pack's own, {whose}, which the workers do not have."
            fix = "Load it with Load Diffusion Model, or with that pack's loader."
            raise UnsupportedModelError(text, fix, name=file.path.name, whose=who_made(type(made)))
    if not (missing := file.missing(network)):
        return file, NOTHING
    text = (
        "The file lacks {count} of the network's weights, first {name}: what is in their place is by chance, as "
        "with ComfyUI's own loader."
    )
    return file, said(text, count=len(missing), name=missing[0])
