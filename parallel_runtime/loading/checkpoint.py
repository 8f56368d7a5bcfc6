"""Opens a model path: what it is, its diffusers config and where its tensors lie. Reads headers only.

Free of diffusers, so that the ComfyUI process can use it too.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from ..errors import CheckpointError, UnsupportedModelError
from ..models.spec import ModelSpec, TensorInfo
from ..registry import MODELS, find_by_transformer_class
from .files import find_files, read_json
from .header import read_header
from .recognise import name_contents, unsupported

PREFIXES = ("model.diffusion_model.", "diffusion_model.")
"""What the original-layout keys of a full checkpoint, or of a model that ComfyUI saved, start with."""
_PLAIN_DTYPES = {"F32", "F16", "BF16", "F64"}
_QUANTISED_ENDINGS = (".comfy_quant", ".weight_scale", ".scale_weight", ".weight_scale_2", ".absmax", ".quant_map")
_DETECTED_KEYS = ("patch_size", "axes_dims_rope")
_DTYPE_NAMES = {"F8_E4M3": "fp8", "F8_E5M2": "fp8", "I8": "int8", "U8": "packed 4 or 8 bit"}


@dataclass(frozen=True)
class TensorPlace:
    """Where a tensor lies: its file, and its key in there."""

    file: Path
    key: str


@dataclass(frozen=True)
class Checkpoint:
    """A model that can be loaded.

    Args:
        path: as asked for.
        layout: "original" (the authors' names) or "diffusers".
        spec: its family.
        config: complete arguments of the diffusers class.
        header: tensor name -> shape and dtype; the prefix is off, and endings are as `spec` spells them.
        places: tensor name -> file and key, for the names of `header`.
        prefix: what the keys in the file start with.
        files: the safetensors files.
        metadata: free-form text of the first file's header.
    """

    path: Path
    layout: Literal["original", "diffusers"]
    spec: ModelSpec
    config: Mapping[str, Any]
    header: Mapping[str, TensorInfo]
    places: Mapping[str, TensorPlace]
    prefix: str
    files: tuple[Path, ...]
    metadata: Mapping[str, str]


def open_checkpoint(path: str | Path) -> Checkpoint:
    """Find out what `path` is: a .safetensors file, a diffusers pipeline folder or its transformer folder.

    Raises:
        CheckpointError: missing or damaged files.
        UnsupportedModelError: another format, another model (named), or quantised weights.
    """
    path = Path(path).expanduser()
    found = find_files(path)
    header: dict[str, TensorInfo] = {}
    places: dict[str, TensorPlace] = {}
    metadata: Mapping[str, str] = {}
    for number, file in enumerate(found.weights):
        content = read_header(file)
        metadata = metadata if number else content.metadata
        header.update(content.tensors)
        places.update({key: TensorPlace(file, key) for key in content.tensors})
    prefix = "" if found.config else _find_prefix(header)
    header = {key[len(prefix) :]: info for key, info in header.items() if key.startswith(prefix)}
    places = {key[len(prefix) :]: place for key, place in places.items() if key.startswith(prefix)}
    if found.config:
        checkpoint = _from_folder(path, found.config, header)
    else:
        checkpoint = _from_file(path, header)
'''
'''
