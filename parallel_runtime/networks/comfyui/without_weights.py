"""Builds a network without memory for its weights, and with the constants that its constructor computes from."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.overrides import TorchFunctionMode


class WithoutWeights(TorchFunctionMode):
    """Inside, tensors without values are on the meta device: ComfyUI's operations make all weights of these.

    One that gets its values in a constructor becomes real. On the meta device as a whole, constructors that read a
    number out of a tensor fail (ACE-Step 1.5).
    """

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Called for each function of torch."""
        options = dict(kwargs or {})
        if func is torch.empty:
            options["device"] = "meta"
        if func is torch.Tensor.copy_ and args[0].is_meta and not args[1].is_meta:
            real = args[1].detach().to(args[0].dtype, copy=True).expand(args[0].shape)
            torch.utils.swap_tensors(args[0], torch.nn.Parameter(real, args[0].requires_grad))
            return args[0]
        return func(*args, **options)
