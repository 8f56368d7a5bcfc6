"""A folder of diffusers': what it is, by headers only, its transformer, and where each of the parameters lies."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ..errors import CheckpointError, UnsupportedModelError
from ..networks.comfyui.without_weights import WithoutWeights
from ..networks.diffusers import flux, hunyuan_dit, pixart, sd3, sdxl, wan
from ..networks.diffusers.lean_imports import import_diffusers
from ..networks.diffusers.spec import ModelSpec
from ..networks.stages import let_go
from ..said import said
from .files import Identity, expand, find_files, identity, read_json
from .header import DTYPES, TensorInfo, check_config, name_contents, read_header
from .reading import Find, OnBytes, Owned, Place, Reader
from .weight_parts import put

log = logging.getLogger(__name__)

MODELS: tuple[ModelSpec, ...] = (
    flux.FLUX, flux.FLUX2, sd3.SD3, wan.WAN, hunyuan_dit.HUNYUAN_DIT, pixart.PIXART, sdxl.SDXL
)  # fmt: skip
_QUANTISED_ENDINGS = (".comfy_quant", ".weight_scale", ".scale_weight", ".weight_scale_2", ".absmax", ".quant_map")
_DTYPE_NAMES = {"F8_E4M3": "fp8", "F8_E5M2": "fp8", "I8": "int8", "U8": "packed 4 or 8 bit"}


@dataclass(frozen=True)
class Checkpoint:
    """A model that can be loaded."""

    path: Path
    spec: ModelSpec
    config: Mapping[str, Any]
    """Arguments of the diffusers class that its config.json gives; the class has defaults for others."""
    header: Mapping[str, TensorInfo]
    identity: Identity  # taken before the headers were read


def open_checkpoint(path: str | Path) -> Checkpoint:
    """Find out what `path` is: a diffusers pipeline folder or its transformer folder. CheckpointError: missing or
    damaged files. UnsupportedModelError: a single file, another format or model, or quantised weights."""
    path = expand(path)
    files, config_file = find_files(path)
    if config_file is None:
        what = "{path} is a single file, which ComfyUI's own class runs, and there is no ComfyUI here."
        raise UnsupportedModelError(what, "Give ComfyUI's folder, or the folder that diffusers saved.", path=path)
    stamp = identity(path)  # before reading: a file replaced from here on will not look like this one
    headers = [read_header(file) for file in files]
    header = {key: info for tensors, _ in headers for key, info in tensors.items()}
    spec, config = _match_folder(path, config_file, header)
    _refuse_quantised(path, header, headers[0][1])
    return Checkpoint(path, spec, config, header, stamp)


def _match_folder(path: Path, config_file: Path, header: Mapping[str, TensorInfo]) -> tuple[ModelSpec, dict[str, Any]]:
    """The family that config.json names, and what it says of the class."""
    written = read_json(config_file)
    if (name := written.get("_class_name")) is None:
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
        if info.dtype not in ("F64", "F32", "F16", "BF16"):
            raise _quantised(path, f"has {_DTYPE_NAMES.get(info.dtype, info.dtype)} weights ({key})")
        if key == "scaled_fp8" or key.endswith(_QUANTISED_ENDINGS):
            raise _quantised(path, f"has quantised weights ({key})")
    if "_quantization_metadata" in metadata:
        raise _quantised(path, "says in its header that its weights are quantised")


def _quantised(path: Path, why: str) -> UnsupportedModelError:
    fix = "Use the bf16, fp16 or fp32 weights of this model."
    return UnsupportedModelError("{path} {why}.", fix, path=path, why=why)


def _unsupported(path: Path, what: str) -> UnsupportedModelError:
    names = ", ".join(f"{spec.title} ({spec.transformer_class})" for spec in MODELS)
    text = "{path} is {what}, not a supported diffusion transformer."
    fix = "Choose another file. {supported}"
    return UnsupportedModelError(text, fix, path=path, what=what, supported=said("Supported are {names}.", names=names))


class CheckpointReader(Reader):
    """Builds the diffusers class of a checkpoint, with weights of one type; see `Reader`."""

    def __init__(self, checkpoint: Checkpoint, dtype: torch.dtype, owned: Owned = None):
        super().__init__(checkpoint.path, checkpoint.identity, checkpoint.spec.cut, owned)
        self._checkpoint = checkpoint
        self._dtype = dtype

    def begin(self, on_bytes: OnBytes) -> tuple[nn.Module, Find]:
        checkpoint = self._checkpoint
        network = build_transformer(checkpoint)
        _check_weights(network, checkpoint)
        let_go(network, self.lists, self.owned)
        for name, weight in network.state_dict(keep_vars=True).items():
            shape = torch.empty(weight.shape, dtype=self._dtype, device="meta")
            put(network, name, nn.Parameter(shape) if isinstance(weight, nn.Parameter) else shape)
        network.requires_grad_(False).eval()
        buffers = dict(network.named_buffers())

        def find(name: str, part: int) -> Place | torch.Tensor:
            if (info := checkpoint.header.get(name)) is None:
                return buffers[name]  # its constructor computes it
            return Place(info.file, info.start, DTYPES[info.dtype])

        return network, find


def _check_weights(transformer: nn.Module, checkpoint: Checkpoint) -> None:
    """CheckpointError where tensors are missing or have another shape than the config says. Reads headers only."""
    path, title = checkpoint.path, checkpoint.spec.title
    wanted = {name: tuple(tensor.shape) for name, tensor in transformer.state_dict().items()}
    if missing := sorted(wanted.keys() - checkpoint.header.keys()):
        what = f"{len(missing)} of {len(wanted)} tensors of {title}, first {missing[0]}"
        lacks = "{path} lacks {what}."
        raise CheckpointError(lacks, "Download the file again, or choose a complete one.", path=path, what=what)
    if misfits := [name for name, shape in wanted.items() if checkpoint.header[name].shape != shape]:
        first = misfits[0]
        what = f"first {first}: {checkpoint.header[first].shape} where {title} of this size has {wanted[first]}"
        unlike = "{path} has {count} tensors of a wrong shape, {what}."
        fix = "Download the file again, or choose another one."
        raise CheckpointError(unlike, fix, path=path, count=len(misfits), what=what)
    if extra := sorted(checkpoint.header.keys() - wanted.keys()):
        log.warning("%s: ignored %d tensors without a place, such as %s", path, len(extra), extra[0])


def build_transformer(checkpoint: Checkpoint) -> nn.Module:
    """The transformer with its matrices on the meta device, and its buffers real. UnsupportedModelError where the
    installed diffusers does not build this model, or there is none."""
    diffusers = import_diffusers()
    transformer_class = getattr(diffusers, checkpoint.spec.transformer_class)
    try:
        with WithoutWeights():
            return transformer_class(**checkpoint.config)
    except (TypeError, ValueError) as error:
        what = f"diffusers {diffusers.__version__} does not build {checkpoint.spec.transformer_class}"
        of = "{what} from the configuration of {path} ({error})."
        fix = "Check config.json, or update diffusers."
        raise UnsupportedModelError(of, fix, what=what, path=checkpoint.path, error=error) from error
