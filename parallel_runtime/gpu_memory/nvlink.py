"""Which GPUs NVLink joins: those that always have it to all others of a host, and those of which NVML says so."""

from __future__ import annotations

import contextlib
import itertools
import re
from collections.abc import Sequence
from typing import Any

_ALWAYS = re.compile(
    r"^(?!.*(PCIe|\bNVL\b|\bActive\b|\bMIG\b|\bGRID\b)).*\b(A100|A800|H100|H200|H800|H20|B200|GB200)\b", re.IGNORECASE
)


def joined_by_nvlink(gpus: Sequence[Any]) -> bool:
    """Whether it joins every two of these, torch's properties of each; not where NVML cannot be asked."""
    if all(_ALWAYS.search(gpu.name) for gpu in gpus):
        return True
    try:
        import pynvml as nvml
    except ImportError:
        return False
    with contextlib.suppress(nvml.NVMLError, OSError, AttributeError):
        nvml.nvmlInit()
        try:
            # Older torch tells no UUID.
            known = [nvml.nvmlDeviceGetHandleByUUID(f"GPU-{getattr(gpu, 'uuid', '')}") for gpu in gpus]
            kind, there = nvml.NVML_P2P_CAPS_INDEX_NVLINK, nvml.NVML_P2P_STATUS_OK
            pairs = list(itertools.permutations(known, 2))
            return bool(pairs) and all(nvml.nvmlDeviceGetP2PStatus(*pair, kind) == there for pair in pairs)
        finally:
            nvml.nvmlShutdown()
    return False
