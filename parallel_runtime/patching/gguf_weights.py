"""Patches of a quantised weight of a GGUF file: they stay beside it, and its layer adds them at each use.

So does the pack's own patcher. The weight itself, which is in blocks that no sum can be written back to, stays.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

_PLAIN = (None, "F32", "F16")


def is_of_gguf(weight: torch.Tensor) -> bool:
    """A tensor of the pack's class, quantised or not."""
    return hasattr(weight, "tensor_type") and hasattr(weight, "tensor_shape")


def is_quantised(weight: Any) -> bool:
    """Whether its numbers are blocks of a quantised type."""
    return is_of_gguf(weight) and getattr(weight.tensor_type, "name", weight.tensor_type) not in _PLAIN


def with_patches(weight: Any, key: str, patches: Sequence[tuple[Any, ...]]) -> torch.Tensor:
    """The same numbers, in the same memory, with patches.

    Args:
        key: ComfyUI's name of the weight.
        patches: as ComfyUI's `calculate_weight` takes them.
    """
    kind: Any = type(weight)
    made: torch.Tensor = kind(
        weight, tensor_type=weight.tensor_type, tensor_shape=weight.tensor_shape, patches=[(list(patches), key)]
    )
    return made
