"""Where tensors and pieces may begin in a region of memory."""

from __future__ import annotations

ALIGNMENT = 512
"""Bytes; as PyTorch's allocator aligns, so that kernels for well aligned operands stay in use."""


def aligned(size: int) -> int:
    """Bytes, rounded up: a tensor or a piece that begins there begins with a whole number."""
    return -(-size // ALIGNMENT) * ALIGNMENT
