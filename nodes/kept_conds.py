"""Conditionings that are brought to the GPU and put together once a run, and not once a step.

ComfyUI leaves them on the host. At every call it copies them into one new tensor there (`cond_cat`), which it brings to
the GPU and casts to the model's type: 3 to 4 ms of a step of FLUX.1, by a profile on an H200.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import comfy.conds
import torch

_UNUSED = 3
"""References to a tensor that only its memory holds: the attribute, a local name, the argument of getrefcount."""


class Memory:
    """Holds the tensor in which the last call's parts were put together."""

    def __init__(self) -> None:
        self._joined: torch.Tensor | None = None

    def join(self, parts: Sequence[torch.Tensor]) -> torch.Tensor:
        """What torch.cat(parts) returns; in the memory of the last call, unless somebody still holds it."""
        joined = self._joined
        first = parts[0]
        shape = (sum(part.shape[0] for part in parts), *first.shape[1:])
        if (
            joined is None
            or sys.getrefcount(joined) > _UNUSED
            or (joined.shape, joined.dtype, joined.device) != (shape, first.dtype, first.device)
        ):
            joined = self._joined = torch.cat(list(parts))
            return joined
        return torch.cat(list(parts), out=joined)


class _Kept:
    """Of a class of ComfyUI's conditionings, one that keeps memory. All its copies, of one run, share it."""

    cond: torch.Tensor
    memory: Memory
    passes: bool
    """Whether a lone one is handed on as it is: nobody is there who might write into it."""

    def _copy_with(self, cond: torch.Tensor) -> _Kept:
        copy: _Kept = super()._copy_with(cond)  # type: ignore[misc]
        copy.memory, copy.passes = self.memory, self.passes
        return copy

    def concat(self, others: Sequence[Any]) -> torch.Tensor:
        if not others and self.passes:
            return self.cond
        parts = [self.cond, *(other.cond for other in others)]
        if any(part.shape[1:] != self.cond.shape[1:] or part.dtype != self.cond.dtype for part in parts):
            return super().concat(others)  # type: ignore[misc]
        return self.memory.join(parts)


class _KeptRegular(_Kept, comfy.conds.CONDRegular):
    pass


class _KeptNoiseShape(_Kept, comfy.conds.CONDNoiseShape):
    pass


class _KeptCrossAttn(_Kept, comfy.conds.CONDCrossAttn):
    pass


_KEPT: dict[type, type[_Kept]] = {
    comfy.conds.CONDRegular: _KeptRegular,
    comfy.conds.CONDNoiseShape: _KeptNoiseShape,
    comfy.conds.CONDCrossAttn: _KeptCrossAttn,
}


_CAST = (comfy.conds.CONDRegular, comfy.conds.CONDCrossAttn)
"""What ComfyUI casts to the model's type, whatever it is."""


def _keep(cond: Any, tensor: torch.Tensor, passes: bool) -> Any:
    make: Any = _KEPT[type(cond)]
    kept = make(tensor)
    kept.memory, kept.passes = Memory(), passes
    return kept


def keeping(model: Any, dtype: torch.dtype, shared: set[str]) -> Callable[..., dict[str, Any]]:
    """`extra_conds` of a BaseModel, with conditionings that keep their memory, on the device and of the type that it
    computes in.

    Args:
        shared: gets the names of those that are one for all rows of a batch.

    They stay as they are where a wrapper, which would see them before ComfyUI's own cast, is added to the model.
    """
    original = type(model).extra_conds
    called = weakref.ref(model)  # which has this function: it is to go with the last reference to it

    def extra_conds(**arguments: Any) -> dict[str, Any]:
        conds = original(called(), **arguments)
        wrapped = _wrapped(getattr(called(), "current_patcher", None))
        for name, cond in conds.items():
            if isinstance(cond, comfy.conds.CONDConstant):
                shared.add(name)
            if type(cond) in _KEPT and isinstance(cond.cond, torch.Tensor):
                tensor = cond.cond
                if not wrapped and type(cond) in _CAST:
                    tensor = tensor.to(arguments.get("device"), dtype if tensor.is_floating_point() else None)
                conds[name] = _keep(cond, tensor, not wrapped)
        return conds

    return extra_conds


def _wrapped(patcher: Any) -> bool:
    """Whether anything stands between ComfyUI's sampler and the model's own code, or nobody knows."""
    if patcher is None:
        return True
    options = patcher.model_options
    return (
        "model_function_wrapper" in options
        or any(patcher.wrappers.values())
        or bool(options.get("transformer_options", {}).get("wrappers"))
    )
