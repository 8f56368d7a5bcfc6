"""A job's tensors: out of the memory that ranks share with the client, or from rank 0 to the others."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

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
        """Open the job's segment, if it has one for this rank. The client makes another where a job needs more."""
        if not job.segment or not self._opens or (self._segment is not None and self._segment.is_at(job.segment)):
            return
        if self._segment is not None:
            self._segment.close()
            self._segment = None
        self._segment = Segment.open(job.segment)


def share(
    specs: Sequence[TensorSpec], payload: memoryview | torch.Tensor | None, device: torch.device, world_size: int
) -> dict[str, torch.Tensor]:
    """Bring the tensors that rank 0 received to every rank's device: one broadcast of raw bytes, if there are others.

    All ranks call it with the same specs; rank 0 alone has a payload: the frame's bytes, or uint8 memory that begins
    with them and is copied, as others will write to it. The host does not wait for that copy.
    """
    total = sum(tensor_bytes(spec) for spec in specs)
    if not total:
        return unpack(specs, payload[:0].to(device) if world_size == 1 and isinstance(payload, torch.Tensor) else None)
    if isinstance(payload, torch.Tensor):
        flat = payload[:total].to(device, non_blocking=True, copy=True)
    elif payload is not None:
        flat = torch.frombuffer(payload, dtype=torch.uint8).to(device)
    else:
        flat = torch.empty(total, dtype=torch.uint8, device=device)
    if world_size > 1:
        dist.broadcast(flat, src=0)
    return unpack(specs, flat)
