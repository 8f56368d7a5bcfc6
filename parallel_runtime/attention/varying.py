"""Sizes that torch.compile, where it is used, is to leave open."""

from __future__ import annotations

from typing import Any

import torch


def leave_open(tensor: torch.Tensor, dim: int) -> None:
    """Let a size of a tensor be any number in a graph that reads it, where the graph's own operations allow that.

    What torch._dynamo.maybe_mark_dynamic does, whose module takes a second to import: most ranks never compile, or
    not before the first picture.
    """
    marked: Any = tensor
    if not hasattr(marked, "_dynamo_weak_dynamic_indices"):
        marked._dynamo_weak_dynamic_indices = set()
        marked._has_dynamo_dim_marking = True
    marked._dynamo_weak_dynamic_indices.add(dim)
