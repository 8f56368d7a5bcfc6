"""Opens a folder of diffusers': what it is, its config and where its tensors lie. Reads headers only."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import UnsupportedModelError
from ..networks.diffusers.registry import MODELS
from ..networks.diffusers.spec import ModelSpec
from ..said import said
from .config_limits import check_config
from .files import Identity, expand, find_files, identity, read_json
from .header import TensorInfo, name_contents, read_header
from .reading import STORED

_QUANTISED_ENDINGS = (".comfy_quant", ".weight_scale", ".scale_weight", ".weight_scale_2", ".absmax", ".quant_map")
_DTYPE_NAMES = {"F8_E4M3": "fp8", "F8_E5M2": "fp8", "I8": "int8", "U8": "packed 4 or 8 bit"}


@dataclass(frozen=True)
class Checkpoint:
    """A model that can be loaded.

    Args:
        spec: its family.
        config: arguments of the diffusers class that its config.json gives; the class has defaults for others.
        header: its tensors by name.
        identity: see `files.identity`, taken before the headers were read.
    """

    path: Path
    spec: ModelSpec
    config: Mapping[str, Any]
    header: Mapping[str, TensorInfo]
    identity: Identity


def open_checkpoint(path: str | Path) -> Checkpoint:
    """Find out what `path` is: a diffusers pipeline folder or its transformer folder.

    Raises:
        CheckpointError: missing or damaged files.
        UnsupportedModelError: a single file, another format, another model (named), or quantised weights.
    """
    path = expand(path)
    files, config_file = find_files(path)
    if config_file is None:
        what = "{path} is a single file, which ComfyUI's own class runs, and there is no ComfyUI here."
        raise UnsupportedModelError(what, "Give ComfyUI's folder, or the folder that diffusers saved.", path=path)
    stamp = identity(path)  # before reading: a file replaced from here on will not look like this one
    contents = [read_header(file) for file in files]
    header = {key: info for content in contents for key, info in content.tensors.items()}
    spec, config = _match_folder(path, config_file, header)
    _refuse_quantised(path, header, contents[0].metadata)
    return Checkpoint(path, spec, config, header, stamp)


def _match_folder(path: Path, config_file: Path, header: Mapping[str, TensorInfo]) -> tuple[ModelSpec, dict[str, Any]]:
    """The family that config.json names, and what it says of the class."""
    written = read_json(config_file)
    name = written.get("_class_name")
    if name is None:
        raise _unsupported(path, f"{name_contents(header)} (its config.json names no diffusers class)")
    spec = next((spec for spec in MODELS if name in (spec.transformer_class, spec.former_class)), None)
    if spec is None:
        raise _unsupported(path, f"a diffusers folder of {name}")
    if not spec.belongs(written):
        raise _unsupported(path, f"a diffusers folder of {name} that is not {spec.title}")
    if written.get("quantization_config"):
        raise _quantised(path, f"has a quantization_config in {config_file.name}")
    given = {key: value for key, value in written.items() if not key.startswith("_") and key not in spec.ignores}
    check_config(config_file, given, len(header))
    return spec, given


def _refuse_quantised(path: Path, header: Mapping[str, TensorInfo], metadata: Mapping[str, str]) -> None:
    for key, info in header.items():
        if info.dtype not in STORED:
            raise _quantised(path, f"has {_DTYPE_NAMES.get(info.dtype, info.dtype)} weights ({key})")
        if key == "scaled_fp8" or key.endswith(_QUANTISED_ENDINGS):
            raise _quantised(path, f"has quantised weights ({key})")
    if "_quantization_metadata" in metadata:
        raise _quantised(path, "says in its header that its weights are quantised")


def _quantised(path: Path, why: str) -> UnsupportedModelError:
    fix = "Use the bf16, fp16 or fp32 weights of this model."
    return UnsupportedModelError("{path} {why}.", fix, path=path, why=why)


def _unsupported(path: Path, what: str) -> UnsupportedModelError:
    """The error for a sound file that is no transformer of ours."""
    names = ", ".join(f"{spec.title} ({spec.transformer_class})" for spec in MODELS)
    text = "{path} is {what}, not a supported diffusion transformer."
    fix = "Choose another file. {supported}"
    return UnsupportedModelError(text, fix, path=path, what=what, supported=said("Supported are {names}.", names=names))
