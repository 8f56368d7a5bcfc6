"""Forwards that something else than a CUDA graph records."""

from __future__ import annotations

from typing import Any

from parallel_runtime.acceleration.recordings import RecordedForward


def recorded_by(record: Any, recorded: RecordedForward) -> Any:
    """The same, recorded by `record`, which stands for `CudaGraphs.record`; None leaves it as it is."""
    if record is not None:
        recorded._graphs.record = record  # type: ignore[method-assign]
    return recorded
