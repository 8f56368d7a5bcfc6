"""Calls of blocks as plain data, for the process that compiles them: what a graph depends on, and no values."""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Mapping
from typing import Any

import msgspec
import torch

from ...acceleration.compiler_messages import describe, make
from .attention import HostAttention

_ATTENTION, _OBJECT, _MAPPING = "attention", "object", "items"
_OF_COMFYUI = "comfy."


class Example(msgspec.Struct, frozen=True):
    """One call of a block.

    Args:
        path: of the block in the network.
        args, kwargs: as `described` gives them.
        modulated: its modulation was ready.
    """

    path: str
    args: Any
    kwargs: Any
    modulated: bool = False


def described(value: Any, is_option: bool = False) -> Any:
    """An argument as plain data.

    Args:
        is_option: it stands in a mapping, of which blocks read a little: what cannot be described there is left out.

    Raises:
        TypeError: what else cannot be described.
    """
    if isinstance(value, HostAttention):
        return {_ATTENTION: None}
    if isinstance(value, Mapping):
        return {_MAPPING: [[described(name), described(each, is_option=True)] for name, each in value.items()]}
    try:
        if dataclasses.is_dataclass(value) and type(value).__module__.startswith(_OF_COMFYUI):
            fields = {each.name: described(getattr(value, each.name)) for each in dataclasses.fields(value)}
            return {_OBJECT: [type(value).__module__, type(value).__qualname__, fields]}
        if isinstance(value, list | tuple):
            return {type(value).__name__: [described(each) for each in value]}
        return describe(value)
    except TypeError:
        if is_option:
            return None
        raise


def made(value: Any, device: torch.device, attention: HostAttention) -> Any:
    """An argument of that description; tensors full of zeros."""
    if not isinstance(value, dict):
        return value
    ((kind, content),) = value.items()
    if kind == _ATTENTION:
        return attention
    if kind == _MAPPING:
        return {made(name, device, attention): made(each, device, attention) for name, each in content}
    if kind == _OBJECT:
        module, name, fields = content
        if not module.startswith(_OF_COMFYUI):
            raise TypeError(f"an object of {module}")
        found = getattr(importlib.import_module(module), name)
        return found(**{each: made(field, device, attention) for each, field in fields.items()})
    if kind in ("list", "tuple"):
        items = [made(each, device, attention) for each in content]
        return tuple(items) if kind == "tuple" else items
    return make(value, device)
