"""The pack ComfyUI-GGUF, from where ComfyUI has it: its reader of GGUF files and its operations on their weights."""

from __future__ import annotations

import hashlib
import importlib
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from ..errors import ConfigurationError, UnsupportedModelError
from ..said import said
from .gguf_header import check_gguf_header

SUFFIX = ".gguf"
_LONGEST_REASON = 300


@dataclass(frozen=True)
class GgufPack:
    """The pack's code.

    Args:
        read: path -> weights by the names of ComfyUI's network, as they are in the file, which is mapped.
        operations: ComfyUI's layers, over such weights.
        sizes: see `check_gguf_header`.
    """

    folder: str
    read: Callable[[str], dict[str, torch.Tensor]]
    operations: Callable[[], Any]
    sizes: Mapping[int, tuple[int, int]]

    def read_file(self, path: Path) -> dict[str, torch.Tensor]:
        """The weights; see `read`.

        Raises:
            CheckpointError: missing or damaged.
            UnsupportedModelError: the pack cannot read them, with its reason.
        """
        check_gguf_header(path, self.sizes)
        try:
            return self.read(str(path))
        except (ArithmeticError, AttributeError, LookupError, OSError, RuntimeError, TypeError, ValueError) as error:
            reason = " ".join(str(error).split())[:_LONGEST_REASON].rstrip(".")
            raise UnsupportedModelError(
                said("ComfyUI-GGUF cannot read {path}: {reason}.", path=path, reason=reason),
                "Update ComfyUI-GGUF, or choose another file.",
            ) from error


def open_pack(folder: str) -> GgufPack:
    """Import what is needed of the pack, and not its nodes, which want ComfyUI's server. `comfy` must be importable.

    Raises:
        ConfigurationError: it is not there, is another version, or its package `gguf` is missing.
    """
    if not (Path(folder) / "loader.py").is_file():
        raise ConfigurationError(
            said("There is no ComfyUI-GGUF in {folder} on the host of this rank.", folder=folder),
            "Install it at the same place on every host, or choose a safetensors file.",
        )
    name = f"gguf_pack_{hashlib.sha256(folder.encode()).hexdigest()[:12]}"
    if name not in sys.modules:
        package = ModuleType(name)
        package.__path__ = [folder]
        sys.modules[name] = package
    try:
        reader, operations = (importlib.import_module(f"{name}.{part}") for part in ("loader", "ops"))
        return GgufPack(folder, reader.gguf_sd_loader, operations.GGMLOps, reader.gguf.GGML_QUANT_SIZES)
    except (ImportError, AttributeError) as error:
        raise ConfigurationError(
            said("ComfyUI-GGUF in {folder} cannot be used: {error}.", folder=folder, error=error),
            "Update it, and install its requirements.",
        ) from error
