"""On which GPU a text encoder goes that has no room on ComfyUI's beside the model: what *Use all GPUs* offers."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

from parallel_runtime.errors import ConfigurationError

from .settings import default_config, read_settings
from .status import read_status

_FOLDERS = {"encoder": ("text_encoders",), "model": ("diffusion_models", "checkpoints")}


def place_here(wish: Mapping[str, Any]) -> list[dict[str, int] | None]:
    """`place_encoders` in this ComfyUI; empty where it has its own encoders on no GPU."""
    import comfy.model_management
    import torch

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
    import folder_paths

    paths = [folder_paths.get_full_path(folder, name) for folder in _FOLDERS[kind]]
    found = [Path(path) for path in paths if path is not None and Path(path).is_file()]
    return found[0].stat().st_size if found else 0


def find_place(encoder: int, model: int, room: Mapping[int, int], pool: Collection[int], own: int) -> int | None:
    """The GPU with most room; None where the encoder stays beside the model, or no other GPU has room for it.

    Args:
        encoder, model: bytes on one GPU.
        room: GPU, as CUDA counts -> bytes for weights of the pool and of ComfyUI.
        pool: GPUs on which the model is.
        own: ComfyUI's GPU.
    """
    left = {gpu: size - model * (gpu in pool) for gpu, size in room.items()}
    if not encoder or not model or own not in pool or left.get(own, encoder) >= encoder:
        return None
    best = max(left, key=lambda gpu: (left[gpu], -gpu))
    return best if left[best] >= encoder else None


def place_encoders(
    wish: Mapping[str, Any],
    status: Mapping[str, Any],
    size_of: Callable[[str, str], int],
    pool: Collection[int],
    own: int,
    working_bytes: int,
) -> list[dict[str, int] | None]:
    """Answer a canvas: for each of its text encoders the GPU where it has room, ComfyUI's own, and what encoder and
    model take; None for one that stays.

    Args:
        wish: {"encoders": lists of files, "models": files}.
        status: see `read_status`; of a model that a pool has, it says what a rank takes.
        size_of: (kind, file) -> its bytes on disk, 0 where there is none; kind is "encoder" or "model".
        working_bytes: that ComfyUI leaves free.
    """
    room = {gpu["index"]: gpu["total"] - gpu["others"] - working_bytes for gpu in status["gpus"]}
    known = {model["name"]: model["bytes_per_rank"] for each in status["pools"] for model in each["models"]}

    def model_size(name: str) -> int:
        return known.get(name.replace("\\", "/").rpartition("/")[2]) or size_of("model", name)

    model = max(map(model_size, _texts(wish.get("models"))), default=0)
    places: list[dict[str, int] | None] = []
    for files in _listed(wish.get("encoders")):
        encoder = sum(size_of("encoder", name) for name in _texts(files))
        gpu = find_place(encoder, model, room, pool, own)
        places.append(None if gpu is None else {"gpu": gpu, "own": own, "encoder": encoder, "model": model})
    return places


def _listed(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _texts(value: Any) -> list[str]:
    return [each for each in _listed(value) if isinstance(each, str)]
