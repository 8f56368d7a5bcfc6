"""What comes to a rank: messages of the supervisor, while none comes what it imports, and the tensors of a job, out of
the memory that ranks share with the client, or from rank 0 to the others."""

from __future__ import annotations

import contextlib
import importlib
import logging
import os
import queue
from collections.abc import Callable, Iterator, Sequence
from functools import partial

import torch
import torch.distributed as dist

from parallel_runtime.acceleration import compiler
from parallel_runtime.networks.comfyui.comfy_code import use_comfyui
from parallel_runtime.patching.comfyui_patches import MODULES
from parallel_runtime.requests.comfyui_code import ComfyuiCode

from ..wire.connection import ConnectionClosed
from ..wire.frames import Frame, FrameError, tensor_bytes
from ..wire.protocol import Abandon, Cancel, Job, Run, TensorSpec
from ..wire.tensors import Segment, unpack
from .joining import Channel

LOADING = ("comfy.supported_models", "comfy.sd")  # what the first network of ComfyUI's imports
QUIET_SECONDS = 0.5  # so long after a job nothing is imported: a sampler's next step would be delayed

log = logging.getLogger("rank")


def import_ahead(device: torch.device, code: ComfyuiCode | None = None) -> Iterator[bool]:
    """Import what later jobs need and this rank has time for while it waits for one: the compiler, and ComfyUI's code
    if its networks and patches will be wanted, one part each time that this is asked for the next.

    The rank's own thread asks: two threads that import modules which import each other get half of them. A job that
    comes meanwhile waits for no more than the part at hand. No rank depends on another's."""
    parts: list[Callable[[], object]] = []
    if code is not None:  # before all else
        parts.append(partial(use_comfyui, code.folder, {**code.options, "cpu": device.type == "cpu"}))
        parts += (partial(importlib.import_module, name) for name in (*MODULES, *LOADING))
    if device.type == "cuda":
        parts += compiler.imports()
    for part in parts:
        try:
            part()
        except Exception as error:  # noqa: BLE001 - of other people's modules; the request that needs them says it
            log.info("importing ahead failed: %s: %s", type(error).__name__, error)
            return
        yield True
    if parts:
        log.info("What later jobs need is imported.")


class Inbox:
    """Filled by one thread, emptied by another."""

    def __init__(self, connection: Channel):
        self.cancelled: int | None = None  # the job that was cancelled last
        self._connection = connection
        self._frames: queue.SimpleQueue[Frame] = queue.SimpleQueue()
        self._quiet = 0.0  # how long nothing has to come before this rank imports

    def receive(self) -> None:
        """Receiver thread. The supervisor's end is this process's end, in the middle of whatever it does."""
        try:
            while True:
                frame = self._connection.receive()
                if isinstance(frame.message, Cancel):
                    self.cancelled = frame.message.number
                else:
                    self._frames.put(frame)
        except (ConnectionClosed, FrameError) as error:
            log.info("the supervisor is gone (%s)", error)
            os._exit(1)  # not 0: torchrun of another machine would wait for those of this one

    def next(self, imports: Iterator[bool]) -> Frame:
        """What comes next; this thread imports while nothing comes."""
        quiet, self._quiet = self._quiet, QUIET_SECONDS
        with contextlib.suppress(queue.Empty):
            return self._frames.get(timeout=quiet)
        while next(imports, False):
            with contextlib.suppress(queue.Empty):
                return self._frames.get(block=False)
        return self._frames.get()

    def verdict(self, number: int) -> Run | Abandon:
        """What the supervisor decides of a job that this rank has prepared."""
        while True:
            message = self._frames.get().message
            if isinstance(message, (Run, Abandon)) and message.number == number:
                return message


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
    with them and is copied, as others will write to it. The host does not wait for that copy."""
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
