"""A network of ComfyUI's as data: classes by name, what their objects hold, tensors beside it. Nothing of it runs. For
networks that a patch calls (a ControlNet for Qwen-Image, LLLite): a graph gives the object, and no file."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn

from ...errors import RequestError
from ...requests.trees import flatten, restore

_MODULES = ("comfy.", "comfy_extras.nodes_model_patch", "torch.nn.")
_NOTED = ("_", "device", "current_weight_patches_uuid", "dynamic_", "pin", "weight_function", "bias_function")
"""How attributes begin that ComfyUI's memory management notes down in modules: of no use elsewhere."""
_FOLDERS = ("comfy_extras", "comfy")
_OF_EVERY_MODULE = frozenset(vars(nn.Module())) - {"training"}


def class_name(kind: Any) -> str:
    """ "module:qualified name" of a class or function; ComfyUI loads its extra nodes under the path of their file."""
    module = str(kind.__module__)
    parts = module.replace("/", ".").replace("\\", ".").split(".")
    found = next((".".join(parts[parts.index(folder) :]) for folder in _FOLDERS if folder in parts), module)
    return f"{found}:{kind.__qualname__}"


def describe_module(module: nn.Module, tensors: list[Tensor]) -> dict[str, Any]:
    """The network as plain data, its tensors added to `tensors` and named by their place; RequestError for no data."""
    fields = {}
    for name, value in vars(module).items():
        if name in _OF_EVERY_MODULE:
            continue
        none: list[Tensor] = []
        try:
            fields[name] = flatten(value, none)
            if none:
                raise TypeError("a tensor")
        except TypeError as error:
            if name.startswith(_NOTED):
                continue
            what = "{name} holds {error} as {name2}, which cannot be sent to the workers."
            fix = "Remove the node that applies it, or load the model with Load Diffusion Model."
            raise RequestError(what, fix, name=type(module).__name__, error=error, name2=name) from error
    own: dict[str, list[list[Any]]] = {}
    for kind, held in (("parameters", module._parameters), ("buffers", module._buffers)):
        own[kind] = []
        for name, tensor in held.items():
            own[kind].append([name, None if tensor is None else len(tensors)])
            if tensor is not None:
                tensors.append(tensor.detach())
    children = [[name, describe_module(child, tensors)] for name, child in module._modules.items() if child is not None]
    return {"class": class_name(type(module)), "fields": fields, "children": children, **own}


def build_module(form: Any, tensors: Sequence[Tensor]) -> nn.Module:
    """The network that `describe_module` was given, over other tensors; RequestError where this ComfyUI has it not."""
    module, _, path = str(form["class"]).partition(":")
    found: Any = None
    if module.startswith(_MODULES):
        found = importlib.import_module(module)
        for name in path.split("."):
            found = getattr(found, name, None)
    if not isinstance(found, type) or not issubclass(found, nn.Module):
        raise RequestError("The workers know no network {module}.{path}.", "Restart ComfyUI.", module=module, path=path)
    made: Any = found.__new__(found)
    nn.Module.__init__(made)
    made.__dict__.update({name: restore(value, ()) for name, value in form["fields"].items()})
    for name, place in form["parameters"]:
        made._parameters[name] = None if place is None else nn.Parameter(tensors[place], requires_grad=False)
    for name, place in form["buffers"]:
        made._buffers[name] = None if place is None else tensors[place]
    for name, child in form["children"]:
        made._modules[name] = build_module(child, tensors)
    return made
