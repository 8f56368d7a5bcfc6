"""Memory that nobody has written holds NaN, so that a test sees whoever reads it."""

from __future__ import annotations

import torch


def fill_with_nan() -> None:
    """From now on in this process: what `torch.empty` and its like give holds NaN, or a type's largest number."""
    torch.use_deterministic_algorithms(True, warn_only=True)  # what the filling depends on
    torch.utils.deterministic.fill_uninitialized_memory = True
    assert torch.empty(1).isnan()
