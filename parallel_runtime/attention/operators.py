"""Operators of ours, which PyTorch's compiler takes as they are.

`torch.library.custom_op` makes them too, but the first call of one imports the compiler: 3 s of a rank's first step,
whether it compiles or not.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

NAMESPACE = "parallel_dit"


def operator(name: str, schema: str) -> Callable[[Callable[..., Any]], Any]:
    """Decorator: torch.ops.parallel_dit.<name>, of any device, whose outputs share no memory with its inputs. No
    autograd.

    Args:
        schema: "(Tensor x, ...) -> Tensor".

    Returns:
        What makes an OpOverload of a function.
    """

    def make(function: Callable[..., Any]) -> Any:
        qualified = f"{NAMESPACE}::{name}"
        torch.library.define(qualified, schema, tags=(torch.Tag.pt2_compliant_tag,))
        torch.library.impl(qualified, "default", function)
        return getattr(getattr(torch.ops, NAMESPACE), name).default

    return make


def shapes_of(made: Any) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Decorator: the function tells the compiler which shapes an operator returns."""

    def register(function: Callable[..., Any]) -> Callable[..., Any]:
        torch.library.register_fake(made.name(), function)
        return function

    return register
