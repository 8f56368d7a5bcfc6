"""Has ComfyUI's layers made with their parameters, where it would leave them out until their weights come."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator


@contextlib.contextmanager
def with_parameters() -> Iterator[None]:
    """Inside, ComfyUI makes layers as it does without comfy-aimdo.

    With it, as on most GPUs, a Linear of comfy.ops has no parameters before its state dict is loaded. Ours gets none,
    and by the names of parameters LoRA and other nodes find the layers.
    """
    try:
        from comfy import memory_management
    except ImportError:  # before ComfyUI knew comfy-aimdo
        yield
        return
    streams = getattr(memory_management, "aimdo_enabled", False)
    memory_management.aimdo_enabled = False
    try:
        yield
    finally:
        memory_management.aimdo_enabled = streams
