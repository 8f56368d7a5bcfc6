"""Tensors from rank 0 to the other ranks. Of the rank processes alone: ComfyUI's does not import torch.distributed."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

from ..wire.frames import tensor_bytes
from ..wire.protocol import TensorSpec
from ..wire.tensors import unpack


def share(
    specs: Sequence[TensorSpec], payload: memoryview | torch.Tensor | None, device: torch.device, world_size: int
) -> dict[str, torch.Tensor]:
    """Bring the tensors that rank 0 received to every rank's device: one broadcast of raw bytes.

    All ranks call it with the same specs; rank 0 alone has a payload. One rank makes no collective call.

    Args:
        payload: the frame's bytes, or uint8 memory that begins with them and is copied: others will write to it.
    """
    total = sum(tensor_bytes(spec) for spec in specs)
    if not total:
        return unpack(specs, None)
    if isinstance(payload, torch.Tensor):
        flat = payload[:total].to(device, non_blocking=True, copy=True)
    elif payload is not None:
        flat = torch.frombuffer(payload, dtype=torch.uint8).to(device)
    else:
        flat = torch.empty(total, dtype=torch.uint8, device=device)
    if world_size > 1:
        dist.broadcast(flat, src=0)
    return unpack(specs, flat)


def take_copy(
    specs: Sequence[TensorSpec], memory: torch.Tensor, device: torch.device
) -> tuple[dict[str, torch.Tensor], torch.cuda.Event | None]:
    """The named tensors, copied to `device`; `memory` begins with them, and holds still until the event, if any."""
    total = sum(tensor_bytes(spec) for spec in specs)
    tensors = unpack(specs, memory[:total].to(device, non_blocking=True, copy=True))
    if device.type != "cuda":
        return tensors, None
    copied = torch.cuda.Event()
    copied.record(torch.cuda.current_stream(device))
    return tensors, copied
