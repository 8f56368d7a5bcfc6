"""GGUF files: which there are, and the pack that reads them."""

from __future__ import annotations

import inspect
import os
import sys
from collections.abc import Iterable
from pathlib import Path

from parallel_runtime.errors import UnsupportedModelError
from parallel_runtime.loading.gguf_pack import SUFFIX
from parallel_runtime.said import said

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
