"""Builds networks with their parameters, without memory for them, and with what constructors compute from."""

from __future__ import annotations

import contextlib
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from ...replaced import replaced


def with_parameters() -> contextlib.AbstractContextManager[None]:
    """Inside, ComfyUI makes layers as without comfy-aimdo, with which a Linear has no parameters before its state dict
    is loaded: ours gets none, and LoRA and other nodes find layers by the names of parameters."""
    try:
        from comfy import memory_management
    except ImportError:  # before ComfyUI knew comfy-aimdo
        return contextlib.nullcontext()
    return replaced(memory_management, "aimdo_enabled", False)


class WithoutWeights(TorchFunctionMode):
    """Inside, tensors without values are on the meta device: layers make weights of these. One that a constructor gives
    values becomes real: constructors that read a number out of a meta tensor fail (ACE-Step 1.5)."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Called for each function of torch."""
        options = dict(kwargs or {})
        if func is torch.empty:
            options["device"] = "meta"
        if func is torch.Tensor.copy_ and args[0].is_meta and not args[1].is_meta:
            real = args[1].detach().to(args[0].dtype, copy=True).expand(args[0].shape)
            torch.utils.swap_tensors(args[0], torch.nn.Parameter(real, args[0].requires_grad))
            return args[0]
        return func(*args, **options)
