"""A rank's device: what it is, what of its memory is free, and the error where that is too little."""

from __future__ import annotations

import re
from collections.abc import Sequence

import psutil
import torch

from .errors import OutOfMemoryError
from .said import Said, said, together

_GIB = 2**30
_RESERVE = 512 * 2**20
"""Left free beside the weights, for the CUDA context's growth and the first activations."""


def free_bytes(device: torch.device) -> int:
    """Bytes that can be allocated on the device now."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return psutil.virtual_memory().available


def is_free(wanted: int, device: torch.device) -> bool:
    """Whether `wanted` bytes can be allocated, with a reserve on a GPU."""
    return wanted + (_RESERVE if device.type == "cuda" else 0) <= free_bytes(device)


def device_title(device: torch.device) -> Said:
    """How the artist knows the device."""
    return said("GPU {index}", index=device.index) if device.type == "cuda" else said("the CPU")


def device_kind(device: torch.device) -> str:
    """What a device's results depend on. CUDA's random stream depends on the number of multiprocessors."""
    if device.type != "cuda":
        return device.type
    gpu = torch.cuda.get_device_properties(device)
    return f"{gpu.name}, {gpu.multi_processor_count} multiprocessors"


def require(
    wanted: int, device: torch.device, rank: int, what: str, ways: Sequence[str], back: int, reserve: int = _RESERVE
) -> None:
    """Refuse by an OutOfMemoryError, before anything is allocated, where fewer bytes than `wanted` are free, with those
    that will be given `back` before, and a `reserve` on a GPU. `what` is said in the message, such as "FLUX.1 in
    float32", and of `ways`, sentences of what would fit, the best two."""
    free = free_bytes(device) + back
    if wanted + (reserve if device.type == "cuda" else 0) <= free:
        return
    ways = ways or ["Free memory there (close other programs, or unload other models), or use other devices."]
    cause = "{what} needs {wanted} GiB on {device_title} (worker {rank}), where {free} GiB are free."
    fix, where = together(ways[:2], " Or: "), device_title(device)
    needs, has = f"{wanted / _GIB:.1f}", f"{free / _GIB:.1f}"
    raise OutOfMemoryError(cause, fix, what=what, wanted=needs, device_title=where, rank=rank, free=has)


def is_out_of_memory(error: BaseException) -> bool:
    """An allocation failed, on a GPU or on the CPU. PyTorch's CPU allocator raises a plain RuntimeError."""
    return isinstance(error, (torch.OutOfMemoryError, MemoryError)) or (
        isinstance(error, RuntimeError) and "can't allocate memory" in str(error)
    )


def explain_out_of_memory(error: BaseException, device: torch.device, rank: int) -> OutOfMemoryError:
    """The typed error for an allocation that failed."""
    wanted = re.search(r"Tried to allocate ([\d.]+ \w+)", str(error)) or re.search(r"allocate (\d+ bytes)", str(error))
    template = "{device} (worker {rank}) ran out of memory; {free} GiB were free there afterwards."
    if wanted:
        template = (
            "{device} (worker {rank}) ran out of memory when it wanted {wanted} more; {free} GiB were free there "
            "afterwards."
        )
    fix = "Use a smaller picture or batch, more GPUs, or free memory on that device."
    where = device_title(device) if device.type == "cuda" else said("The CPU")
    more, free = wanted[1] if wanted else "", f"{free_bytes(device) / _GIB:.1f}"
    return OutOfMemoryError(template, fix, device=where, rank=rank, wanted=more, free=free)
