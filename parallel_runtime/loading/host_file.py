"""What a model file is to ComfyUI: its own recognition, run on the file's header, and its model without the network's
weights. `comfy` must be importable (networks/comfyui/comfy_code.py): ComfyUI's process and a rank both come here."""

from __future__ import annotations

import json
import math
import mmap
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import nn

from ..errors import CheckpointError, UnsupportedModelError
from ..networks.comfyui.without_weights import WithoutWeights, with_parameters
from ..networks.tables.comfyui import find_network
from ..replaced import replaced
from ..requests.facts import FLOAT8, INT8, PLAIN, QUANTISED
from ..said import Said, said
from .files import Identity, identity
from .gguf_pack import GgufPack, open_pack
from .header import DTYPES, check_host_header, name_contents, read_header
from .reading import Place

_FIX = "Update ComfyUI, or choose another file."
_NORESERVE = 0x4000  # Linux's MAP_NORESERVE, which Python names since 3.11: a file may be larger than the memory
_TAKES = {"float8_e4m3fn": FLOAT8, "int8_tensorwise": INT8}
_SMALL = 1 << 16  # bytes of a tensor that is read: ComfyUI looks into norms and descriptions of quantised layers


@dataclass(frozen=True)
class HostFile:
    """A file that ComfyUI recognises."""

    path: Path
    identity: Identity
    config: Any  # ComfyUI's model configuration; its types are not chosen yet
    state_dict: dict[str, torch.Tensor]
    """Without a prefix, by ComfyUI's names; large ones are on the meta device, or mapped from a GGUF file."""
    size: int  # bytes of the weights in the file
    stored: torch.dtype | None  # the type that most weights have; None where they are quantised
    prefix: str = ""  # what the network's names have in a checkpoint
    outside: Mapping[str, torch.Tensor] = field(default_factory=dict)  # what else is in the file; small ones are read
    beside: set[str] = field(default_factory=set)  # names that ComfyUI's model is made with, some of them in `outside`
    pack: GgufPack | None = None  # that reads a GGUF file

    @property
    def takes(self) -> str:
        """What layers take: PLAIN; FLOAT8, on a GPU that multiplies these; INT8, where they round it token by token; or
        QUANTISED."""
        if self.stored is not None or self.pack is not None:
            return PLAIN
        told = {bytes(each.tolist()) for name, each in self.state_dict.items() if name.endswith(".comfy_quant")}
        layers = [json.loads(each) for each in told]
        formats = {str(each.get("format")) for each in layers}
        if len(formats) != 1 or any(each.get("full_precision_matrix_mult") for each in layers):
            return QUANTISED
        return _TAKES.get(formats.pop(), QUANTISED)

    def build(self) -> nn.Module:
        """ComfyUI's network without its weights, with plain operations, to be looked at and not run.
        UnsupportedModelError: ComfyUI recognises the file and cannot build its network, with its reason."""
        import comfy.ops

        self.config.set_inference_dtype(torch.float32, None)
        plain = replaced(self.config, "custom_operations", comfy.ops.disable_weight_init)
        with plain, comfyuis_reason(said("ComfyUI cannot build the network of {path}", path=self.path.name)):
            network: nn.Module = self.build_model().diffusion_model
        return network

    def missing(self, network: nn.Module) -> list[str]:
        """Names of weights that the network (see `build`) has and the file has not: ComfyUI leaves them as their memory
        was. UnsupportedModelError: ComfyUI does not get as far as that, with its reason; or sizes are unlike."""
        with comfyuis_reason(said("ComfyUI cannot read {path}", path=self.path.name)):
            given = self.config.process_unet_state_dict(dict(self.state_dict))
            for name, wanted in network.named_parameters() if self.pack is not None else ():
                # The pack's layers take weights of any size, which ComfyUI's own loader refuses: a run would fail.
                if name in given and math.prod(given[name].shape) != wanted.numel():
                    raise ValueError(f"{name} is {list(given[name].shape)}, and {list(wanted.shape)} is wanted")
        return [name for name, _ in network.named_parameters() if name not in given]

    def build_model(self) -> Any:
        """ComfyUI's BaseModel, with the types and operations of the configuration, around a network without weights:
        what it computes with beside the network is real. Conditioning is made in ComfyUI's process, and some models
        have weights for that (Stable Audio's lengths, Zero123's cameras); some nodes read a few out of the network
        (SeedVR2's prompts). ComfyUI's classes raise anything: RuntimeError, ValueError, KeyError, ..."""
        tensors = {**self.outside, **self.state_dict}
        with with_parameters(), WithoutWeights(), warnings.catch_warnings():
            # A module says so whose weights WithoutWeights makes real.
            warnings.filterwarnings("ignore", ".*copying from a non-meta parameter")
            read = _ReadWhenTaken(self.path, tensors, self.beside)
            model = self.config.get_model(read, "", device=torch.device("cpu"))
        network = model.diffusion_model
        data = find_network(type(network))
        for name in data.read_outside if data is not None else ():
            if name in tensors:
                real = _read_tensor(self.path, self.prefix + name, tensors[name])
                setattr(network, name, real.to(getattr(network, name).dtype))
        return model


class MappedFile:
    """A safetensors file as tensors; it stays mapped while one of them is there. Who writes to one writes to a page of
    its own. Raises as `read_header`; CheckpointError, too, for numbers of a type that torch lacks."""

    def __init__(self, path: Path):
        self.path = path
        infos, self.metadata = read_header(path)
        with path.open("rb") as file:
            access = mmap.PROT_READ | mmap.PROT_WRITE
            mapped = mmap.mmap(file.fileno(), 0, flags=mmap.MAP_PRIVATE | _NORESERVE, prot=access)
        whole = torch.frombuffer(mapped, dtype=torch.uint8)
        self._begin, self._size = whole.data_ptr(), whole.numel()
        self.tensors: dict[str, torch.Tensor] = {}
        for name, info in infos.items():
            if (dtype := DTYPES.get(info.dtype)) is None:
                what = "{path} has numbers of the type {dtype} ({name}), which torch {version} lacks."
                values = {"path": path, "dtype": info.dtype, "name": name, "version": torch.__version__}
                raise CheckpointError(what, "Update torch, or choose another file.", **values)
            count = math.prod(info.shape)
            flat = torch.empty(0, dtype=dtype)
            if count:
                flat = torch.frombuffer(mapped, dtype=dtype, count=count, offset=info.start)
            self.tensors[name] = flat.view(info.shape)

    def place(self, tensor: torch.Tensor) -> Place | None:
        """Where a tensor's numbers lie in the file, one after the other; None where they do not, or where somebody has
        written to them, as the loader does where it converts diffusers' layout."""
        if tensor.is_meta or tensor.device.type != "cpu" or not tensor.numel() or not tensor.is_contiguous():
            return None
        if tensor.is_inference() or tensor._version:
            return None
        start = tensor.data_ptr() - self._begin
        return Place(self.path, start, tensor.dtype) if 0 <= start < self._size else None


class _ReadWhenTaken(dict[str, torch.Tensor]):
    """A state dict on the meta device; a tensor is read when somebody takes it, from the safetensors file in which it
    has the same name or is not. `taken` gets the names of those that were asked for."""

    def __init__(self, path: Path, tensors: Mapping[str, torch.Tensor], taken: set[str]):
        super().__init__(tensors)
        self._path = path
        self._taken = taken

    def __getitem__(self, name: str) -> torch.Tensor:
        self._taken.add(name)
        return _read_tensor(self._path, name, super().__getitem__(name))

    def get(self, name: str, default: Any = None) -> Any:
        return self[name] if name in self else default  # noqa: SIM401 - it is what get does

    def pop(self, name: str, *default: Any) -> Any:
        if name not in self:
            return super().pop(name, *default)
        tensor = self[name]
        del self[name]
        return tensor


def _read_tensor(path: Path, name: str, tensor: torch.Tensor) -> torch.Tensor:
    """The tensor, from the file where it is on the meta device and the file has it."""
    if not tensor.is_meta:
        return tensor
    with safe_open(path, framework="pt", device="cpu") as file:
        return file.get_tensor(name) if name in file.keys() else tensor  # noqa: SIM118 - it is no dict


@contextmanager
def comfyuis_reason(what: Said) -> Iterator[None]:
    """Inside, errors of ComfyUI's code, which takes a file's names and shapes for granted, become an
    UnsupportedModelError: what it cannot do, the begin of a sentence, and its reason."""
    try:
        yield
    except (ArithmeticError, AssertionError, AttributeError, LookupError, RuntimeError, TypeError, ValueError) as error:
        reason = "{what}: {reason}."
        raise UnsupportedModelError(reason, _FIX, what=what, reason=f"{type(error).__name__}: {error}"[:500]) from error


def open_host_file(path: str | Path, gguf: str = "") -> HostFile:
    """Have ComfyUI recognise a safetensors file: a diffusion model, or the one in a checkpoint; or a GGUF file, which
    the pack in the folder `gguf` reads. CheckpointError: missing or damaged. UnsupportedModelError: ComfyUI does not
    know it. ConfigurationError: the pack cannot be used."""
    path = Path(path)
    stamp = identity(path)
    pack = open_pack(gguf) if gguf else None
    if pack is not None:
        state_dict, metadata = pack.read_file(path), {}
    else:
        mapped = MappedFile(path)
        state_dict, metadata = mapped.tensors, mapped.metadata
    check_host_header(path, state_dict, metadata)
    if pack is None:  # copies, or the whole file stays mapped: a deleted one would keep its place on the disk
        small = {name: each.clone() for name, each in state_dict.items() if each.nbytes <= _SMALL}
        state_dict = {name: small.get(name, each.to("meta")) for name, each in state_dict.items()}
    with comfyuis_reason(said("ComfyUI cannot tell what {path} is", path=path.name)):
        return _recognise(path, stamp, state_dict, metadata, pack)


def _recognise(
    path: Path, stamp: Identity, state_dict: dict[str, torch.Tensor], metadata: dict[str, str], pack: GgufPack | None
) -> HostFile:
    """As comfy.sd.load_diffusion_model_state_dict does, up to the configuration."""
    import comfy.model_detection as detection
    import comfy.supported_models
    import comfy.utils

    if pack is None:
        state_dict, metadata = comfy.utils.convert_old_quants(state_dict, "", metadata=metadata)
    prefix = detection.unet_prefix_from_state_dict(state_dict)
    outside: dict[str, torch.Tensor] = {}
    if inner := comfy.utils.state_dict_prefix_replace(state_dict, {prefix: ""}, filter_keys=True):
        outside, state_dict = state_dict, inner
        if pack is None:
            state_dict, metadata = comfy.utils.convert_old_quants(state_dict, "", metadata=metadata)
    # Some models are told by what a checkpoint has beside the network (Zero123).
    known = {name for model in comfy.supported_models.models for name in model.required_keys}
    told = {name: outside[name] for name in known & outside.keys()}
    config = detection.model_config_from_unet({**told, **state_dict}, "", metadata=metadata)
    if config is None:
        if (converted := detection.convert_diffusers_mmdit(state_dict, "")) is not None:
            state_dict = converted
            config = detection.model_config_from_unet(state_dict, "")
        elif (config := detection.model_config_from_diffusers_unet(state_dict)) is not None:
            names = comfy.utils.unet_to_diffusers(config.unet_config)
            state_dict = {name: state_dict[theirs] for theirs, name in names.items() if theirs in state_dict}
    if config is None:
        unknown = "{path} is {name_contents}, not a diffusion model supported by this ComfyUI."
        raise UnsupportedModelError(unknown, _FIX, path=path, name_contents=name_contents(state_dict))
    size = sum(tensor.nbytes for tensor in state_dict.values())
    stored = None if getattr(config, "quant_config", None) else comfy.utils.weight_dtype(state_dict)
    return HostFile(path, stamp, config, state_dict, size, stored, prefix if inner else "", outside, set(told), pack)
