"""Conditionings that are brought to the GPU once a run, and not once a step.

ComfyUI leaves them on the host. At every call it copies them into one new tensor there (`cond_cat`), which it brings to
the GPU and casts to the model's type: 3 to 4 ms of a step of FLUX.1, by a profile on an H200.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import comfy.conds
import torch

from .transportable import AROUND_LOOP

_BROUGHT = (comfy.conds.CONDRegular, comfy.conds.CONDCrossAttn)
"""What ComfyUI brings to the model's device at each call, whatever it is."""


def keeping(model: Any, shared: set[str]) -> Callable[..., dict[str, Any]]:
    """`extra_conds` of a BaseModel, with conditionings on the device. They keep their type, which ComfyUI changes at
    each call: ControlNets of another type read them, too. They stay where they are where a wrapper, which would see
    them before ComfyUI brings them, is added to the model. `shared` gets the names of those that all rows share."""
    original = type(model).extra_conds
    called = weakref.ref(model)  # which has this function: it is to go with the last reference to it

    def extra_conds(**arguments: Any) -> dict[str, Any]:
        conds = original(called(), **arguments)
        wrapped = _wrapped(getattr(called(), "current_patcher", None))
        for name, cond in conds.items():
            if isinstance(cond, comfy.conds.CONDConstant):
                shared.add(name)
            if not wrapped and type(cond) in _BROUGHT and isinstance(cond.cond, torch.Tensor):
                conds[name] = type(cond)(cond.cond.to(arguments.get("device")))
        return conds

    return extra_conds


def _wrapped(patcher: Any) -> bool:
    """Whether anything stands between ComfyUI's sampler and the model's own code, or nobody knows."""
    if patcher is None:
        return True
    options = patcher.model_options
    inside = options.get("transformer_options", {}).get("wrappers", {})
    return "model_function_wrapper" in options or any(
        kind not in AROUND_LOOP["wrappers"] and any(named.values())
        for wrappers in (patcher.wrappers, inside)
        for kind, named in wrappers.items()
    )
