"""Values with tensors anywhere inside of them (dicts, lists, tuples, objects of ComfyUI's networks), as plain data
beside a list of tensors."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Any

import torch

from ..errors import RequestError
from .patches import Attached, Patch

_DEEPEST = 8
_OBJECTS = "comfy.ldm."
"""Modules whose objects travel: ComfyUI's networks, which take some of their own (the layout of a packed sequence)."""
_PLAIN = (bool, int, float, str, type(None))


def flatten(value: Any, tensors: list[torch.Tensor], depth: int = 0) -> Any:
    """The value as plain data, in which a tensor is its place in `tensors`, to which it is added; TypeError for a kind
    of value that does not travel."""
    if depth > _DEEPEST:
        raise TypeError(f"a value nested deeper than {_DEEPEST}")
    if isinstance(value, torch.Tensor):
        # One that is named twice travels once.
        place = next((place for place, each in enumerate(tensors) if each is value), len(tensors))
        if place == len(tensors):
            tensors.append(value)
        return {"tensor": place}
    if isinstance(value, torch.dtype):
        return {"dtype": str(value).removeprefix("torch.")}
    if isinstance(value, _PLAIN):
        return {"plain": value}
    if type(value) in (list, tuple, torch.Size):
        kind = "list" if type(value) is list else "tuple"
        return {kind: [flatten(item, tensors, depth + 1) for item in value]}
    if isinstance(value, dict) and all(isinstance(key, (str, int)) for key in value):
        return {"dict": [[key, flatten(item, tensors, depth + 1)] for key, item in value.items()]}
    if isinstance(value, (set, frozenset)) and all(isinstance(item, (str, int)) for item in value):
        return {"set": sorted(value)}
    if isinstance(value, Patch):
        values = flatten(dict(value.values), tensors, depth + 1)
        return {"patch": [value.code, value.number, value.kept, value.since, values]}
    if isinstance(value, Attached):
        return {"attached": value.number}
    if _is_object(value):
        fields = flatten(vars(value), tensors, depth + 1)
        return {"object": [type(value).__module__, type(value).__qualname__, fields]}
    raise TypeError(f"a {type(value).__name__}")


def restore(tree: Any, tensors: Sequence[Any], networks: Mapping[int, Any] = MappingProxyType({})) -> Any:
    """The value that `flatten` was given, with these in the places of its tensors and of the networks that it names;
    RequestError where it is no such data, or one of the networks is not here."""
    if isinstance(tree, Mapping) and len(tree) == 1:
        ((kind, inner),) = tree.items()
        if kind == "plain" and isinstance(inner, _PLAIN):
            return inner
        if kind == "tensor" and isinstance(inner, int) and 0 <= inner < len(tensors):
            return tensors[inner]
        if kind == "dtype" and isinstance(dtype := getattr(torch, str(inner), None), torch.dtype):
            return dtype
        if kind in ("list", "tuple") and isinstance(inner, list):
            items = [restore(item, tensors, networks) for item in inner]
            return items if kind == "list" else tuple(items)
        if kind == "dict" and isinstance(inner, list):
            return {key: restore(item, tensors, networks) for key, item in inner}
        if kind == "set" and isinstance(inner, list):
            return frozenset(inner)
        if kind == "patch" and isinstance(inner, list) and len(inner) == 5:
            code, number, kept, since, values = inner
            return Patch(str(code), int(number), int(kept), int(since), restore(values, tensors, networks))
        if kind == "attached" and isinstance(inner, int):
            if inner not in networks:
                text = "Network {number} is not known to the workers."
                raise RequestError(text, "Queue the prompt again.", number=inner)
            return Attached(inner, networks[inner])
        if kind == "object" and isinstance(inner, list) and len(inner) == 3:
            module, name, fields = inner
            return _restore_object(str(module), str(name), restore(fields, tensors, networks))
    raise RequestError("The workers were sent an argument that is not what it says.", "Report this.")


def _restore_object(module: str, name: str, fields: Mapping[str, Any]) -> Any:
    """An object of one of ComfyUI's networks' own classes, its attributes put in as they were: nothing of it runs."""
    found = getattr(importlib.import_module(module), name, None) if module.startswith(_OBJECTS) else None
    if not isinstance(found, type):
        raise RequestError("The workers know no {module}.{name}.", "Restart ComfyUI.", module=module, name=name)
    made: Any = object.__new__(found)
    made.__dict__.update(fields)
    return made


def map_tensors(value: Any, function: Callable[[torch.Tensor], Any]) -> Any:
    """The value with each of its tensors replaced."""
    if isinstance(value, torch.Tensor):
        return function(value)
    if isinstance(value, dict):
        return {key: map_tensors(item, function) for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(map_tensors(item, function) for item in value)
    if isinstance(value, Patch):
        return replace(value, values=map_tensors(dict(value.values), function))
    if _is_object(value):
        made: Any = object.__new__(type(value))
        made.__dict__.update(map_tensors(vars(value), function))
        return made
    return value


def _is_object(value: Any) -> bool:
    return type(value).__module__.startswith(_OBJECTS) and hasattr(value, "__dict__")
