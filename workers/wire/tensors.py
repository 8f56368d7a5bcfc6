"""Tensors of a job: as bytes, and in memory that client and rank 0 share, so that none goes through a socket.

A segment has two halves. The client writes a request's tensors into the first, rank 0 the answer's into the second.
A pool runs one job at a time, and a request is written when the last answer has been taken: so neither half is
written while it is read. Where there is a GPU both sides register the segment as pinned, so that copies run at the
speed of the bus and beside kernels."""

from __future__ import annotations

import contextlib
import fcntl
import logging
import mmap
import os
import re
from collections.abc import Mapping, Sequence

import numpy as np
import torch

from parallel_runtime.errors import RequestError, SegmentError
from parallel_runtime.gpu_memory.cuda_driver import PORTABLE, register, unregister

from .frames import ITEM_BYTES, tensor_bytes
from .protocol import Done, TensorSpec

LEAST_BYTES = 16 << 20
_DTYPES = {name: getattr(torch, name) for name in ITEM_BYTES}
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}
_ALIGNMENT = 16
_PATH = re.compile(r"/proc/\d+/fd/\d+")

log = logging.getLogger("parallel_dit")


def spec_of(name: str, tensor: torch.Tensor) -> TensorSpec:
    """What a tensor is on the wire."""
    if tensor.dtype not in _NAMES:
        raise TypeError(f"tensor {name!r} of type {tensor.dtype} does not travel")
    return TensorSpec(name, _NAMES[tensor.dtype], tuple(tensor.shape))


def pack(tensors: Mapping[str, torch.Tensor]) -> tuple[tuple[TensorSpec, ...], list[memoryview]]:
    """Specs and bytes of named tensors, ready for `Connection.send`. Tensors on a GPU are copied to the host."""
    specs, buffers = [], []
    for name, tensor in tensors.items():
        specs.append(spec_of(name, tensor))
        host = tensor.detach().cpu().contiguous()
        if host.numel():
            buffers.append(host.reshape(-1).view(torch.uint8).numpy().data)
    return tuple(specs), buffers


def unpack(specs: Sequence[TensorSpec], payload: memoryview | torch.Tensor | None) -> dict[str, torch.Tensor]:
    """Named tensors of a payload, bytes or a uint8 tensor on any device, without a copy where the alignment allows."""
    if payload is None:
        payload = torch.empty(0, dtype=torch.uint8)
    elif not isinstance(payload, torch.Tensor):
        payload = torch.frombuffer(payload, dtype=torch.uint8)
    tensors: dict[str, torch.Tensor] = {}
    start = 0
    for spec in specs:
        length = tensor_bytes(spec)
        part = payload[start : start + length]
        start += length
        if part.storage_offset() % _ALIGNMENT:
            part = part.clone()
        dtype = _DTYPES[spec.dtype]
        tensors[spec.name] = part.view(dtype).reshape(spec.shape) if length else part.new_empty(spec.shape, dtype=dtype)
    return tensors


def unpack_meta(specs: Sequence[TensorSpec]) -> dict[str, torch.Tensor]:
    """The named tensors without their data, on the meta device: what PREPARE validates, the same on every rank."""
    return {spec.name: torch.empty(spec.shape, dtype=_DTYPES[spec.dtype], device="meta") for spec in specs}


class Segment:
    """One mapping of a segment, by the process that made it or by one of the same user that opened it by its path."""

    def __init__(self, descriptor: int, path: str):
        self.path = path
        self._descriptor = descriptor
        self._map = mmap.mmap(descriptor, 0)
        with torch.inference_mode(False):  # what was made in ComfyUI's cannot be written to by a node that leaves it
            whole = torch.frombuffer(self._map, dtype=torch.uint8)
            self.request, self.answer = whole.split(whole.numel() // 2)
        # Pinned where this process computes on a GPU; copies also work where that fails, only slower.
        self._pinned = torch.cuda.is_initialized() and register(whole, PORTABLE)

    @classmethod
    def create(cls, size: int) -> Segment:
        """Make one whose halves hold that many bytes, or more, so that seldom another one is needed soon; SegmentError
        where this machine has no such memory."""
        descriptor, half = -1, max(LEAST_BYTES // 2, 1 << (size - 1).bit_length() if size else 0)
        try:
            descriptor = os.memfd_create("parallel-dit", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
            os.ftruncate(descriptor, 2 * half)
            # Sealed: whoever maps it can rely on its size, and never reads beyond an end that moved.
            fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
            return cls(descriptor, f"/proc/{os.getpid()}/fd/{descriptor}")
        except (OSError, ValueError, AttributeError) as error:
            raise _cannot_share(error, descriptor) from error

    @classmethod
    def open(cls, path: str) -> Segment:
        """Map the segment of another process of this user; SegmentError where it is gone, or is none."""
        descriptor = -1
        try:
            if not _PATH.fullmatch(path):
                raise ValueError(f"{path!r} names no segment")
            descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
            sealed = fcntl.fcntl(descriptor, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK
            if os.fstat(descriptor).st_uid != os.getuid() or not sealed:
                raise ValueError(f"{path!r} is no segment of this user")
            return cls(descriptor, path)
        except (OSError, ValueError) as error:
            raise _cannot_share(error, descriptor) from error

    def is_at(self, path: str) -> bool:
        """Whether a path leads to this very segment: a later one may have the number, and so the path, of this one."""
        with contextlib.suppress(OSError):
            return path == self.path and os.path.samestat(os.stat(path), os.fstat(self._descriptor))
        return False

    def close(self) -> None:
        """Let go of it. Views of it stay valid as long as somebody holds them."""
        if self._pinned:
            unregister(self.request.data_ptr())
            self._pinned = False
        self.request = self.answer = torch.empty(0, dtype=torch.uint8)
        with contextlib.suppress(BufferError):  # a view is held: the mapping goes with it
            self._map.close()
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


def write(half: torch.Tensor, tensors: Mapping[str, torch.Tensor]) -> tuple[TensorSpec, ...]:
    """Write tensors, on the CPU or a GPU, into one half of a segment, one after the other; return what they are, when
    all bytes are there. TypeError where the type of one does not travel."""
    specs = tuple(spec_of(name, tensor) for name, tensor in tensors.items())
    start, devices = 0, set()
    for tensor in tensors.values():
        data = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
        place = half[start : start + data.numel()]
        start += data.numel()
        if data.is_cuda:
            place.copy_(data, non_blocking=True)
            devices.add(data.device)
        else:
            copy_alone(data, place)
    for device in devices:
        torch.cuda.current_stream(device).synchronize()
    return specs


def copy_alone(data: torch.Tensor, place: torch.Tensor) -> None:
    """Copy on the host by this thread alone: to wake others costs 6 ms each on a virtual machine of many cores."""
    np.copyto(place.numpy(), data.cpu().numpy())


def _cannot_share(error: Exception, descriptor: int) -> SegmentError:
    if descriptor >= 0:
        os.close(descriptor)
    return SegmentError(f"No memory can be shared with the workers: {error}.", "")


class Transport:
    """The client's side. One job at a time: what `put` wrote is taken by the ranks before it is called again."""

    def __init__(self) -> None:
        self._segment: Segment | None = None
        self._possible = True
        self._on_its_way: torch.cuda.Event | None = None

    def put(
        self, tensors: Mapping[str, torch.Tensor], answer_bytes: int = 0
    ) -> tuple[tuple[TensorSpec, ...], Sequence[memoryview], str]:
        """Bring tensors to where the ranks can take them: what they are, with the bytes that go over the socket, or the
        path of the segment in which they lie, with room for such an answer. TypeError where one does not travel."""
        self._finish_taking()
        segment = self._segment_for(max(answer_bytes, sum(tensor.nbytes for tensor in tensors.values())))
        if segment is None:
            return *pack(tensors), ""
        return write(segment.request, tensors), (), segment.path

    def take(
        self, done: Done, payload: memoryview | None, device: torch.device, into: torch.Tensor | None = None
    ) -> dict[str, torch.Tensor]:
        """An answer's tensors on `device`, or its only one in given memory: RequestError if of another shape."""
        half: torch.Tensor | None = None
        if done.in_segment:
            assert self._segment is not None
            half = self._segment.answer[: sum(tensor_bytes(spec) for spec in done.tensors)]
        if into is not None:
            ((name, tensor),) = unpack(done.tensors, payload if half is None else half).items()
            if tensor.shape != into.shape:
                shapes = {"made": tuple(tensor.shape), "wanted": tuple(into.shape)}
                raise RequestError("The workers made {made}, not {wanted}.", "Report this.", **shapes)
            return {name: into.copy_(tensor)}
        if half is None:
            return {name: tensor.to(device) for name, tensor in unpack(done.tensors, payload).items()}
        copied = torch.empty(half.numel(), dtype=torch.uint8, device=device)
        if copied.is_cuda:
            copied.copy_(half, non_blocking=True)
            self._on_its_way = torch.cuda.current_stream(copied.device).record_event()
        else:
            copy_alone(half, copied)
        return unpack(done.tensors, copied)

    def give_up(self, error: SegmentError) -> None:
        """The ranks cannot open the segment: everything goes over the socket from now on."""
        log.info("Parallel DiT: tensors go over a socket. %s", error)
        self.close()
        self._possible = False

    def close(self) -> None:
        """Let go of the memory; a later `put` takes other memory."""
        self._finish_taking()
        if self._segment is not None:
            self._segment.close()
            self._segment = None

    def _finish_taking(self) -> None:
        if self._on_its_way is not None:  # the last answer is being copied to the GPU, perhaps
            self._on_its_way.synchronize()
            self._on_its_way = None

    def _segment_for(self, size: int) -> Segment | None:
        if not self._possible or (self._segment is not None and self._segment.request.numel() >= size):
            return self._segment
        self.close()
        try:
            self._segment = Segment.create(size)
        except SegmentError as error:
            self.give_up(error)
        return self._segment
