"""Memory that the client and rank 0 share, for the tensors of a job: no tensor goes through a socket.

A segment has two halves. The client writes a request's tensors into the first, rank 0 the answer's into the second.
A pool runs one job at a time, and a request is written when the last answer has been taken: so neither half is
written while it is read. Where there is a GPU both sides register the segment as pinned, so that copies run at the
speed of the bus and beside kernels.
"""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
import re
from collections.abc import Mapping

import numpy as np
import torch

from parallel_runtime.errors import SegmentError
from parallel_runtime.pinned_memory import PORTABLE, register, unregister
from parallel_runtime.said import said

from .protocol import TensorSpec
from .tensors import spec_of

LEAST_BYTES = 16 << 20
_PATH = re.compile(r"/proc/\d+/fd/\d+")


class Segment:
    """One mapping of a segment, by the process that made it or by one that opened it by its path.

    Args:
        path: a file of the process that made it, which others of the same user can open while it lives.

    Raises:
        ValueError: too small to be one.
    """

    def __init__(self, descriptor: int, path: str):
        self.path = path
        self._descriptor = descriptor
        self._map = mmap.mmap(descriptor, 0)
        whole = torch.frombuffer(self._map, dtype=torch.uint8)
        self.request, self.answer = whole.split(whole.numel() // 2)
        self._pinned = _register(whole)

    @classmethod
    def create(cls, half: int) -> Segment:
        """Make a segment whose halves hold that many bytes.

        Raises:
            SegmentError: no such memory on this machine.
        """
        try:
            descriptor = os.memfd_create("parallel-dit", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        except (OSError, AttributeError) as error:
            raise SegmentError("No memory can be shared with the workers: " + str(error) + ".", "") from error
        try:
            os.ftruncate(descriptor, 2 * half)
            # Sealed: whoever maps it can rely on its size, and never reads beyond an end that moved.
            seals = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
            fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, seals)
            return cls(descriptor, f"/proc/{os.getpid()}/fd/{descriptor}")
        except (OSError, ValueError) as error:
            os.close(descriptor)
            raise SegmentError("No memory can be shared with the workers: " + str(error) + ".", "") from error

    @classmethod
    def open(cls, path: str) -> Segment:
        """Map the segment of another process of this user.

        Raises:
            SegmentError: it is gone, or no such segment.
        """
        if not _PATH.fullmatch(path):
            raise SegmentError(said("{path} names no segment.", path=repr(path)), "")
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        except OSError as error:
            raise SegmentError("No memory can be shared with the workers: " + str(error) + ".", "") from error
        try:
            wanted = fcntl.F_SEAL_SHRINK
            if os.fstat(descriptor).st_uid != os.getuid() or not fcntl.fcntl(descriptor, fcntl.F_GET_SEALS) & wanted:
                raise SegmentError(said("{path} is no segment of this user.", path=repr(path)), "")
            return cls(descriptor, path)
        except (OSError, ValueError) as error:
            os.close(descriptor)
            raise SegmentError("No memory can be shared with the workers: " + str(error) + ".", "") from error

    def is_at(self, path: str) -> bool:
        """Whether a path leads to this very segment: a later one may have the number, and so the path, of this one."""
        try:
            return path == self.path and os.path.samestat(os.stat(path), os.fstat(self._descriptor))
        except OSError:
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


def half_for(size: int) -> int:
    """Bytes of each half of a new segment that is to hold `size`: seldom another one is needed soon."""
    return max(LEAST_BYTES // 2, 1 << (size - 1).bit_length() if size else 0)


def write(half: torch.Tensor, tensors: Mapping[str, torch.Tensor]) -> tuple[TensorSpec, ...]:
    """Write tensors into one half of a segment, one after the other; return what they are, when all bytes are there.

    Args:
        tensors: on the CPU or a GPU; no more than `half` holds.

    Raises:
        TypeError: a tensor of a type that does not travel.
    """
    specs = tuple(spec_of(name, tensor) for name, tensor in tensors.items())
    start, devices = 0, set()
    for tensor in tensors.values():
        data = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
        half[start : start + data.numel()].copy_(data, non_blocking=True)
        start += data.numel()
        if data.device.type == "cuda":
            devices.add(data.device)
    for device in devices:
        torch.cuda.current_stream(device).synchronize()
    return specs


def read(half: torch.Tensor, into: torch.Tensor) -> torch.cuda.Event | None:
    """Copy a half's bytes; nobody may write to the half before the event, if there is one.

    Args:
        into: as many bytes, on the CPU or a GPU.
    """
    if into.device.type != "cuda":
        # By numpy, which copies with this thread alone: to wake threads for it costs more than the copy.
        np.copyto(into.numpy(), half.numpy())
        return None
    into.copy_(half, non_blocking=True)
    event = torch.cuda.Event()
    event.record(torch.cuda.current_stream(into.device))
    return event


def _register(memory: torch.Tensor) -> bool:
    """Pin the memory where this process computes on a GPU; copies also work where that fails, only slower."""
    if not torch.cuda.is_initialized():
        return False
    return register(memory, PORTABLE)
