"""What PyTorch's compiler is told: operators of ours, which it takes as they are, and sizes that it leaves open.

`torch.library.custom_op` makes them too, but the first call of one imports the compiler: 3 s of a rank's first step,
whether it compiles or not.
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
    """Let a size of a tensor be any number in a graph that reads it, where the graph's own operations allow that.

    What torch._dynamo.maybe_mark_dynamic does, whose module takes a second to import: most ranks never compile, or
    not before the first picture.
    """
    marked: Any = tensor
    if not hasattr(marked, "_dynamo_weak_dynamic_indices"):
        marked._dynamo_weak_dynamic_indices = set()
        marked._has_dynamo_dim_marking = True
    marked._dynamo_weak_dynamic_indices.add(dim)


def without_row_stride(tensor: Tensor) -> Tensor:
    """The same tensor; of a single row without the distance to a next one, for which a graph would be made anew.

    Half of a joint tensor (1, tokens, ...) has that of the whole.
    """
    if tensor.dim() > 1 and tensor.shape[0] == 1 and tensor.stride(0) != tensor.shape[1] * tensor.stride(1):
        return tensor.squeeze(0).unsqueeze(0)
    return tensor
