"""Replaces the one place where a diffusers attention processor computes attention, in one model only.
A processor's `__call__` reaches attention through a global name of its module: `dispatch_attention_fn`, or `F` with
`scaled_dot_product_attention` in the older ones. The model gets a copy whose `__call__` has that name bound to ours."""

from __future__ import annotations

import copy
import functools
import types
from collections.abc import Callable, Mapping
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from ..errors import UnsupportedModelError
from .kernels import Attend
from .rotary import rotate_by_operator

_ROTATION = "apply_rotary_emb"


def apply(modules: Mapping[str, nn.Module], attend: Attend, traced: bool = False) -> None:
    """Let `attend` compute the attention of these modules, by their paths, and where they are `traced` an operator
    their rotation. UnsupportedModelError of a processor that reaches attention in neither way, before changes."""
    # One class for all processors of a class: torch.compile then shares one graph between the blocks.
    classes: dict[type, type] = {}
    for path, module in modules.items():
        kind = type(getattr(module, "processor", None))
        if kind not in classes:
            classes[kind] = _rebound_class(kind, attend, path, traced)
    for module in modules.values():
        processor: Any = module.processor
        rebound: Any = copy.copy(processor)
        rebound.__class__ = classes[type(processor)]
        rebound.attends = attend
        module._modules.pop("processor", None)  # a processor with weights is a submodule: two places, one name
        module.processor = rebound


def _rebound_class(processor_class: type, attend: Attend, path: str, traced: bool) -> type:
    call = getattr(processor_class, "__call__", None)  # noqa: B004 - the function itself is wanted
    names = call.__code__.co_names if isinstance(call, types.FunctionType) else ()
    replaced: dict[str, Any]
    if "dispatch_attention_fn" in names:
        replaced = {"dispatch_attention_fn": _dispatch(attend)}
    elif "F" in names and "scaled_dot_product_attention" in names:
        replaced = {"F": _functional(attend)}
    else:
        what = "The attention module {path} uses {name}, whose attention cannot be exchanged."
        fix = "Load the model with the processors that diffusers gives it, without IP-Adapter or custom attention."
        raise UnsupportedModelError(what, fix, path=path, name=processor_class.__name__)
    assert isinstance(call, types.FunctionType)
    rotation: Any = call.__globals__.get(_ROTATION)
    if traced and getattr(rotation, "__module__", "") == "diffusers.models.embeddings":
        replaced[_ROTATION] = rotate_by_operator(rotation)
    # Without __name__ torch.compile looks names up in this dictionary; with it, in the module of that name.
    namespace = {name: value for name, value in call.__globals__.items() if name != "__name__"} | replaced
    function = types.FunctionType(call.__code__, namespace, call.__name__, call.__defaults__, call.__closure__)
    function.__kwdefaults__ = call.__kwdefaults__

    # torch.compile names what a graph reads after the first way that it finds to it, and the name is part of the key
    # of a graph on disk. Through the namespace, which is no module's, the name holds an address of this process.
    @functools.wraps(function)
    def found_through_processor(self: Any, *args: Any, **kwargs: Any) -> Any:
        assert self.attends is not None
        return function(self, *args, **kwargs)

    members = {"__call__": found_through_processor, "__module__": __name__}
    return type(processor_class.__name__, (processor_class,), members)


def _dispatch(attend: Attend) -> Callable[..., Tensor]:
    """Return a stand-in for diffusers.models.attention_dispatch.dispatch_attention_fn."""

    def dispatch_attention_fn(
        query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, dropout_p: float = 0.0,
        is_causal: bool = False, scale: float | None = None, enable_gqa: bool = False,
        attention_kwargs: dict[str, Any] | None = None, *, backend: Any = None, parallel_config: Any = None,
    ) -> Tensor:  # fmt: skip
        if is_causal or dropout_p or attention_kwargs:
            what = "The model asks for causal attention, dropout or kernel options inside of attention."
            raise UnsupportedModelError(what, "Use one of the supported models.")
        if enable_gqa:
            key = key.repeat_interleave(query.shape[2] // key.shape[2], dim=2)
            value = value.repeat_interleave(query.shape[2] // value.shape[2], dim=2)
        return attend(query, key, value, attn_mask, scale)

    return dispatch_attention_fn


def _functional(attend: Attend) -> types.ModuleType:
    """Return a stand-in for torch.nn.functional whose scaled_dot_product_attention is ours."""
    dispatch = _dispatch(attend)

    def scaled_dot_product_attention(query: Tensor, key: Tensor, value: Tensor, *options: Any, **named: Any) -> Tensor:
        query, key, value = query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2)
        return dispatch(query, key, value, *options, **named).transpose(1, 2)

    functional = types.ModuleType("functional")
    names = {name: value for name, value in vars(F).items() if not name.startswith("__")}
    vars(functional).update(names, scaled_dot_product_attention=scaled_dot_product_attention)
    return functional
