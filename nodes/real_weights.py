"""The weights of a MODEL whose network is in the pool, for nodes that want them: ComfyUI reads the file."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import comfy.model_management
import comfy.ops
import comfy.sd
import torch

from parallel_runtime.errors import RequestError
from parallel_runtime.patching.comfyui_patches import Computing

from .model_files import is_gguf

if TYPE_CHECKING:
    from .remote_transformer import RemoteTransformer


@dataclass(frozen=True)
class Source:
    """Where the weights of a network that is elsewhere come from: its file, and what a LoRA changes of it now. `dtype`
    is of plain weights; None where the file says it itself."""

    remote: RemoteTransformer
    dtype: torch.dtype | None

    def load(self) -> Any:
        """What Load Diffusion Model makes of the file, in ComfyUI's own memory; RequestError for a GGUF file."""
        path = self.remote.model.path
        if is_gguf(Path(path)):
            what = "{path} is no .safetensors file: no node can take weights out of it."
            raise RequestError(what, "Choose a .safetensors file in Parallel Loader.", path=path)
        return comfy.sd.load_diffusion_model(path, model_options={} if self.dtype is None else {"dtype": self.dtype})

    def patch(self, part: torch.nn.Module, name: str, bypass: bool) -> torch.nn.Module:
        """Write the patched weights into a part of the network, in place, by its path; "" for the whole. With `bypass`
        also what a bypass LoRA gives beside a layer, which counts where the layer is run."""
        wanted = self.remote.patches
        changed = {*wanted.patches.weights, *wanted.hooks.weights}
        computing = Computing(comfy.model_management.get_torch_device(), wanted.patches, wanted.hooks)
        for path, module in part.named_modules():
            layer = ".".join(each for each in (name, path) if each)
            for kind, value in list(module.named_parameters(recurse=False)):
                key, weight = f"{layer}.{kind}", value.data
                if key in changed:
                    weight = computing.weight(key, weight, module)
                if bypass and layer in wanted.patches.bypass:
                    weight = computing.folded(key, weight, layer, module.get_parameter("weight").shape[1])
                if weight is not value.data:
                    setattr(module, kind, torch.nn.Parameter(weight, requires_grad=False))
        return part


def give_weights(transformer: torch.nn.Module, source: Source) -> None:
    """Have `state_dict` of a network without weights read them, for those who ask for them (ControlLoRA), and those of
    its parts (SD3.5's ControlNets ask for its embedders'). As a part of a model's, for which torch asks with arguments,
    it stays without: there names are what is looked for."""
    for part in ("", *(name for name, _ in transformer.named_children())):
        module = transformer.get_submodule(part)
        module.state_dict = partial(_state_dict, source, part, module.state_dict)  # type: ignore[method-assign]


def _state_dict(source: Source, part: str, names_alone: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    if args or kwargs:
        return names_alone(*args, **kwargs)
    device = comfy.model_management.get_torch_device()
    weights = source.patch(source.load().model.diffusion_model.get_submodule(part), part, bypass=False).state_dict()
    return {name: tensor.to(device) for name, tensor in weights.items()}


class LayersHere:
    """Parts of a network that a ControlNet runs here (Qwen-Image Fun), with its weights, patched as the ranks' are. All
    are read when one of them is first run."""

    def __init__(self, names: Sequence[str], source: Source):
        self._names = names
        self._source = source
        self._read: dict[str, torch.nn.Module] = {}
        self._patched: tuple[tuple[str, str], dict[str, torch.nn.Module]] | None = None

    def put_into(self, transformer: torch.nn.Module) -> None:
        for name in self._names:
            transformer.get_submodule(name).forward = partial(self._run, name)

    def _run(self, name: str, *args: Any, **kwargs: Any) -> Any:
        if not self._read:
            network = self._source.load().model.diffusion_model
            device = comfy.model_management.get_torch_device()
            self._read = {each: network.get_submodule(each).to(device) for each in self._names}
        wanted = self._source.remote.patches.names
        if self._patched is None or self._patched[0] != wanted:
            changed = {each: self._source.patch(deepcopy(part), each, bypass=True) for each, part in self._read.items()}
            self._patched = wanted, changed
        return self._patched[1][name](*args, **kwargs)


def _run_elsewhere(module: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
    raise refuse(f"run a part of them (a {type(module).__name__} layer)")


def operations_elsewhere() -> type:
    """ComfyUI's operations for a network that is elsewhere: what runs one of its layers here is told so."""
    plain = comfy.ops.disable_weight_init
    layers = {
        name: type(name, (kind,), {"forward": _run_elsewhere})
        for name, kind in vars(plain).items()
        if isinstance(kind, type) and issubclass(kind, torch.nn.Module)
    }
    return type("elsewhere", (plain,), layers)


def refuse(what: str) -> RequestError:
    """The error of a node that cannot have them; `what` it wants to do is the end of a sentence."""
    text = "The weights of this MODEL are in the worker processes, where no node can {what}."
    return RequestError(text, "Load the model with Load Diffusion Model for that.", what=what)
