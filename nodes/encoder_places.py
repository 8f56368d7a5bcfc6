"""What ComfyUI and the pool say of a text encoder's place: its GPU, its file, the devices of loaders by default."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import comfy.model_management
import folder_paths
import torch

from parallel_runtime.errors import ConfigurationError

from .panel.encoder_gpu import place_encoders
from .panel.settings import default_config, read_settings
from .panel.status import read_status

_FOLDERS = {"encoder": ("text_encoders",), "model": ("diffusion_models", "checkpoints")}


def place_here(wish: Mapping[str, Any]) -> list[dict[str, int] | None]:
    """For each text encoder of a canvas the GPU where it has room; empty where ComfyUI has its own on no GPU."""
    from workers.launch import resolve_devices

    device = comfy.model_management.text_encoder_device()
    if device.type != "cuda":
        return []
    own = torch.cuda.current_device() if device.index is None else device.index
    try:
        pool = resolve_devices(default_config(read_settings()), torch.cuda.device_count).devices
    except ConfigurationError:  # the loader tells of it
        return []
    working = int(comfy.model_management.minimum_inference_memory())
    return place_encoders(wish, read_status(), size_on_disk, pool, own, working)


def size_on_disk(kind: str, name: str) -> int:
    """Bytes of an "encoder" or a "model", by its name in ComfyUI's lists; 0 where there is none."""
    paths = [folder_paths.get_full_path(folder, name) for folder in _FOLDERS[kind]]
    found = [Path(path) for path in paths if path is not None and Path(path).is_file()]
    return found[0].stat().st_size if found else 0
