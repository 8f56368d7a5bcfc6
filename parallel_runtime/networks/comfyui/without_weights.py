"""Builds a network without memory for its weights, and with the constants that its constructor computes from."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.overrides import TorchFunctionMode


class WithoutWeights(TorchFunctionMode):
    """Inside, tensors without values are on the meta device: ComfyUI's operations make all weights of these.

    On the meta device as a whole, constructors that read a number out of a tensor fail (ACE-Step 1.5).
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
        return func(*args, **options)
