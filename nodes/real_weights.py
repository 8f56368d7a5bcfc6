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
    """Have `state_dict` of a network without weights, and of its parts, read them for those who ask (ControlLoRA,
    SD3.5's ControlNets). Where torch asks with arguments, for a part of a model's, names are what is looked for."""
    for part in ("", *(name for name, _ in transformer.named_children())):
        module = transformer.get_submodule(part)
        module.state_dict = partial(_state_dict, source, part, module.state_dict)  # type: ignore[method-assign]


def _state_dict(source: Source, part: str, names_alone: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    if args or kwargs:
        return names_alone(*args, **kwargs)
    device = comfy.model_management.get_torch_device()
    weights = source.patch(source.load().model.diffusion_model.get_submodule(part), part, bypass=False).state_dict()
    return {name: tensor.to(device) for name, tensor in weights.items()}


def run_here(transformer: torch.nn.Module, names: Sequence[str], source: Source) -> None:
    """Have these parts run here, with their weights: a ControlNet runs them (Qwen-Image Fun). Read at the first run."""
    read: dict[str, torch.nn.Module] = {}
    patched: dict[tuple[str, str], dict[str, torch.nn.Module]] = {}  # by the patches that the ranks have now

    def run(name: str, *args: Any, **kwargs: Any) -> Any:
        if not read:
            network, device = source.load().model.diffusion_model, comfy.model_management.get_torch_device()
            read.update({each: network.get_submodule(each).to(device) for each in names})
        wanted = source.remote.patches.names
        if wanted not in patched:
            patched.clear()
            patched[wanted] = {each: source.patch(deepcopy(part), each, bypass=True) for each, part in read.items()}
        return patched[wanted][name](*args, **kwargs)

    for name in names:
        transformer.get_submodule(name).forward = partial(run, name)


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
