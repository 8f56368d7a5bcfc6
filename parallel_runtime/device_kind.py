"""Which devices compute alike."""

from __future__ import annotations

import torch


def device_kind(device: torch.device) -> str:
    """What a device's results depend on. CUDA's random stream depends on the number of multiprocessors."""
    if device.type != "cuda":
        return device.type
    gpu = torch.cuda.get_device_properties(device)
    return f"{gpu.name}, {gpu.multi_processor_count} multiprocessors"
