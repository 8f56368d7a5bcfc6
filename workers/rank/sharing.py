"""A job's tensors: out of the memory that ranks share with the client, or from rank 0 to the others.

Of the rank processes alone: ComfyUI's does not import torch.distributed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType

import torch
import torch.distributed as dist

from parallel_runtime.engine.prepared import Rows

from ..wire.frames import tensor_bytes
from ..wire.protocol import Job, TensorSpec
from ..wire.shared_memory import Segment
from ..wire.tensors import unpack


class ClientMemory:
    """The segment of the last job that had one. `for_all`: every rank copies its tensors, else rank 0 alone."""

    def __init__(self, *, for_all: bool, rank: int):
        self.for_all = for_all
        self._opens = for_all or rank == 0  # by the kind of the pool and the rank alone
        self._segment: Segment | None = None

    def of(self, job: Job) -> Segment | None:
        """The segment in which the job's tensors lie, if this rank takes them out of one: opened in PREPARE, as the
        client may have let go of it since, where it did not wait for a cancelled job."""
        return self._segment if job.segment and self._opens else None

    def open_for(self, job: Job) -> None:
        """Open the job's segment, if it has one for this rank. The client makes another one where a job needs more
        memory; a step needs none.
        """
        if not job.segment or not self._opens or (self._segment is not None and self._segment.is_at(job.segment)):
            return
        if self._segment is not None:
            self._segment.close()
            self._segment = None
        self._segment = Segment.open(job.segment)


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
    specs: Sequence[TensorSpec],
    memory: torch.Tensor,
    device: torch.device,
    own_rows: Mapping[str, Rows] = MappingProxyType({}),
) -> tuple[dict[str, torch.Tensor], torch.cuda.Event | None]:
    """The named tensors, copied to `device`; `memory` begins with them, and holds still until the event, if any.

    Args:
        own_rows: what is copied of a tensor of which not all is read; the rest of it is zero.
    """
    tensors: dict[str, torch.Tensor] = {}
    together: list[TensorSpec] = []
    start = place = 0
    for spec in specs:
        size = tensor_bytes(spec)
        rows = own_rows.get(spec.name)
        if rows is not None:
            tensors |= unpack(together, memory[start:place].to(device, non_blocking=True, copy=True))
            tensors[spec.name] = _copy_rows(spec, memory[place : place + size], device, rows)
            together, start = [], place + size
        else:
            together.append(spec)
        place += size
    tensors |= unpack(together, memory[start:place].to(device, non_blocking=True, copy=True))
    if device.type != "cuda":
        return tensors, None
    return tensors, torch.cuda.current_stream(device).record_event()


def _copy_rows(spec: TensorSpec, data: torch.Tensor, device: torch.device, rows: Rows) -> torch.Tensor:
    """One copy for each row of dim 0: what lies apart would be joined on the host first."""
    copy = unpack((spec,), torch.zeros(data.numel(), dtype=torch.uint8, device=device))[spec.name]
    begin, end = rows.second or (0, spec.shape[1] if len(spec.shape) > 1 else 1)
    if not data.numel() or begin >= end:
        return copy
    shape = (spec.shape[0], spec.shape[1] if len(spec.shape) > 1 else 1, -1)
    source, target = data.view(shape), copy.view(-1).view(torch.uint8).view(shape)
    for row in range(*rows.first):
        target[row, begin:end].copy_(source[row, begin:end], non_blocking=True)
    return copy
