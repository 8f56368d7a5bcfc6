"""The artist's cancel, between ComfyUI's way and the pool's."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import comfy.model_management

from parallel_runtime.requests.control import Cancelled


@contextmanager
def stopping_with_prompt() -> Iterator[Callable[[], bool]]:
    """Yield the question whether the prompt was cancelled; a pool's `Cancelled` becomes ComfyUI's own exception, whose
    flag is taken back, so that the next prompt runs."""
    try:
        yield comfy.model_management.processing_interrupted
    except Cancelled as cancelled:
        comfy.model_management.throw_exception_if_processing_interrupted()
        raise comfy.model_management.InterruptProcessingException from cancelled
