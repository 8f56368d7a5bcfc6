"""What of a tensor torch.compile, where it is used, is to leave open, and what it need not see."""

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


def without_row_stride(tensor: torch.Tensor) -> torch.Tensor:
    """The same tensor; of a single row without the distance to a next one, for which a graph would be made anew.

    Half of a joint tensor (1, tokens, ...) has that of the whole.
    """
    if tensor.dim() > 1 and tensor.shape[0] == 1 and tensor.stride(0) != tensor.shape[1] * tensor.stride(1):
        return tensor.squeeze(0).unsqueeze(0)
    return tensor
