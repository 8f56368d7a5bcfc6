"""Which GPUs NVLink joins: those that always have it to all others of a host, and those of which NVML says so."""

from __future__ import annotations

import contextlib
import itertools
import re
from collections.abc import Callable, Sequence
from typing import Any

_ALWAYS = re.compile(
    r"^(?!.*(PCIe|\bNVL\b|\bActive\b|\bMIG\b|\bGRID\b)).*\b(A100|A800|H100|H200|H800|H20|B200|GB200)\b", re.IGNORECASE
)


def joined_by_nvlink(gpus: Sequence[Any]) -> bool:
    """Whether it joins every two of these, torch's properties of each; not where NVML cannot be asked."""
    if all(_ALWAYS.search(gpu.name) for gpu in gpus):
        return True
    joined: list[bool] = []

    def ask(nvml: Any) -> None:
        # Older torch tells no UUID.
        known = [nvml.nvmlDeviceGetHandleByUUID(f"GPU-{getattr(gpu, 'uuid', '')}") for gpu in gpus]
        joined[:] = [all(has_nvlink(nvml, *pair) for pair in itertools.permutations(known, 2))]

    if len(gpus) > 1:
        ask_driver(ask)
    return joined == [True]


def has_nvlink(nvml: Any, first: Any, second: Any) -> bool:
    """Whether it joins two of NVML's GPUs."""
    status = nvml.nvmlDeviceGetP2PStatus(first, second, nvml.NVML_P2P_CAPS_INDEX_NVLINK)
    return bool(status == nvml.NVML_P2P_STATUS_OK)


def ask_driver(ask: Callable[[Any], None]) -> None:
    """Call it with NVML's functions, if there is a driver that can do its work. What the driver does not tell ends the
    call: virtual GPUs and small ones lack many answers."""
    try:
        import pynvml as nvml
    except ImportError:  # which the doctor's list of packages says
        return
    with contextlib.suppress(nvml.NVMLError):
        nvml.nvmlInit()
        try:
            ask(nvml)
        finally:
            nvml.nvmlShutdown()
