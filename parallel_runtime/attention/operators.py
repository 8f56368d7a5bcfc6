"""What PyTorch's compiler is told: operators of ours, which it takes as they are, and sizes that it leaves open.
`torch.library.custom_op` makes them too, but its first call imports the compiler: 3 s of a rank's first step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


def operator(name: str, schema: str) -> Callable[[Callable[..., Any]], Any]:
    """Decorator that makes torch.ops.parallel_dit.<name> of a function for any device, without autograd, whose outputs
    share no memory with its inputs; the schema is "(Tensor x, ...) -> Tensor"."""

    def make(function: Callable[..., Any]) -> Any:
        qualified = f"parallel_dit::{name}"
        torch.library.define(qualified, schema, tags=(torch.Tag.pt2_compliant_tag,))
        torch.library.impl(qualified, "default", function)
        return getattr(torch.ops.parallel_dit, name).default

    return make


shapes_of: Callable[[Any], Callable[[Callable[..., Any]], Callable[..., Any]]] = torch.library.register_fake
"""Decorator: the function tells the compiler which shapes an operator returns."""


def leave_open(tensor: Tensor, dim: int) -> None:
    """Leave a size open in graphs, as torch._dynamo.maybe_mark_dynamic, whose module takes a second to import."""
    marked: Any = tensor
    if not hasattr(marked, "_dynamo_weak_dynamic_indices"):
        marked._dynamo_weak_dynamic_indices = set()
        marked._has_dynamo_dim_marking = True
    marked._dynamo_weak_dynamic_indices.add(dim)
