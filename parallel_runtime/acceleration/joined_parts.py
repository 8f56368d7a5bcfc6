"""What a value of a traced block is joined of."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx


def joined_parts(x: Any, dim: int) -> list[fx.Node]:
    """The tensors whose concatenation along `dim` x is, where nothing else reads it; else x alone."""
    if x.target is torch.cat and len(x.users) == 1:
        parts, *given = x.args or (x.kwargs["tensors"],)
        if (*given, x.kwargs.get("dim", 0))[0] == dim:
            return list(parts)
    return [x]
