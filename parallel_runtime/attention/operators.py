"""What PyTorch's compiler is told: operators of ours, which it takes as they are, and sizes that it leaves open.

`torch.library.custom_op` makes them too, but its first call imports the compiler: 3 s of a rank's first step.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


def operator(name: str, schema: str) -> Callable[[Callable[..., Any]], Any]:
    """Decorator that makes an OpOverload of a function: torch.ops.parallel_dit.<name>, of any device, without autograd,
    whose outputs share no memory with its inputs; the schema is "(Tensor x, ...) -> Tensor"."""

    def make(function: Callable[..., Any]) -> Any:
        qualified = f"parallel_dit::{name}"
        torch.library.define(qualified, schema, tags=(torch.Tag.pt2_compliant_tag,))
        torch.library.impl(qualified, "default", function)
        return getattr(torch.ops.parallel_dit, name).default

    return make


def shapes_of(made: Any) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Decorator: the function tells the compiler which shapes an operator returns."""

    def register(function: Callable[..., Any]) -> Callable[..., Any]:
        torch.library.register_fake(made.name(), function)
        return function

    return register


def leave_open(tensor: Tensor, dim: int) -> None:
    """Let a size of a tensor be any number in a graph that reads it, where the graph's own operations allow that: what
    torch._dynamo.maybe_mark_dynamic does, whose module takes a second to import, and most ranks never compile."""
    marked: Any = tensor
    if not hasattr(marked, "_dynamo_weak_dynamic_indices"):
        marked._dynamo_weak_dynamic_indices = set()
        marked._has_dynamo_dim_marking = True
    marked._dynamo_weak_dynamic_indices.add(dim)
