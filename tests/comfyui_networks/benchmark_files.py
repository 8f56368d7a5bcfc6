"""What ComfyUI says of the files that benchmarks/in_comfyui writes for its own networks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from benchmarks.in_comfyui.encoder_files import list_encoder_parts
from benchmarks.in_comfyui.encoders import ENCODERS
from benchmarks.in_comfyui.files import write_file
from benchmarks.in_comfyui.host_families import HOST_REAL, HostFamily, file_name, host_tiny
from benchmarks.in_comfyui.host_files import list_parts
from parallel_runtime.loading.host_file import open_host_file
from parallel_runtime.networks.comfyui.comfy_code import use_comfyui


def look(rank: int, world_size: int, comfyui: str, folder: str) -> dict[str, Any]:
    """{"quantised": {tiny file: whether}, "gigabytes": {real one: of its tensors}}."""
    use_comfyui(comfyui, {"cpu": True})
    quantised = {}
    for name, family in host_tiny().items():
        path = Path(folder) / file_name(name)
        write_file(path, family, 3, "cpu", Path(comfyui))
        if path.suffix == ".gguf":  # ComfyUI reads it with a pack; see test_in_comfyui.py
            continue
        quantised[name] = open_host_file(path).stored is None
    gigabytes = {}
    for name, family in HOST_REAL.items():
        assert isinstance(family, HostFamily)
        parts = list_parts(family, Path(comfyui), 3)
        gigabytes[name] = sum(_bytes(part.shape, part.dtype.itemsize) for part in parts) / 1e9
    return {"quantised": quantised, "gigabytes": gigabytes}


def look_at_encoders(rank: int, world_size: int, comfyui: str) -> dict[str, tuple[str, float]]:
    """Text encoder -> what ComfyUI recognises, "" where nothing, and gigabytes of its tensors."""
    use_comfyui(comfyui, {"cpu": True})
    from comfy.sd import detect_te_model

    found = {}
    for name, encoder in ENCODERS.items():
        parts = list_encoder_parts(encoder, Path(comfyui))
        seen = detect_te_model({part.key: torch.empty(part.shape, device="meta") for part in parts})
        size = sum(_bytes(part.shape, part.dtype.itemsize) for part in parts) / 1e9
        found[name] = ("" if seen is None else seen.name, size)
    return found


def _bytes(shape: tuple[int, ...], each: int) -> int:
    for size in shape:
        each *= size
    return each
