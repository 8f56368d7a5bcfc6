"""The memory of a rank's share, and that of another rank's: of the host, or of a GPU that others can read.

That of a GPU is the CUDA driver's, by its IPC handles, and so are copies of another one's: PyTorch would give a tensor
over another GPU's memory that GPU's device, and a copy a context on it. The driver takes addresses; its copies are
launched on a stream, and recorded, like any.
"""

from __future__ import annotations

import ctypes
import mmap
import os
from typing import Any

import psutil
import torch

from ..gpu_memory import cuda_driver
from ..gpu_memory.cuda_driver import MAPPED, DriverError, MemoryHandle, register, unregister

_LEFT_FREE = 20  # shares leave this part of the host's memory
_STAT_BLOCK = 512  # bytes, as stat counts what a file has
_LAZY_PEER_ACCESS = 1


class HostShare:
    """Memory of the host, an anonymous file (memfd), so that nothing is left behind however a pool ends: this rank's
    `own`, or by another's descriptor that one's. `address`: where others find it, in words without spaces."""

    def __init__(self, size: int, descriptor: int | None = None):
        size, self.own = max(size, 1), descriptor is None
        if descriptor is None:
            descriptor = os.memfd_create("parallel-dit-share", os.MFD_CLOEXEC)
            os.truncate(descriptor, size)
        self._descriptor = descriptor
        self._map: mmap.mmap | None = mmap.mmap(descriptor, size)
        self.memory = torch.frombuffer(self._map, dtype=torch.uint8)
        self.address = f"host:{os.getpid()}:{descriptor}:{size}"
        self.pinned = False

    def copy_to(self, target: torch.Tensor, start: int) -> None:
        """Copy bytes from `start` on to the device, on the current stream."""
        target.copy_(self.memory[start : start + target.numel()], non_blocking=True)

    def pin(self) -> None:
        """Pin it, so that a GPU copies at the speed of its link."""
        if not self.pinned and torch.cuda.is_available():
            self.pinned = register(self.memory, MAPPED)

    def close(self) -> None:
        """Unmap it; the memory is free when every rank has closed it."""
        if self._map is None:
            return
        if self.pinned:
            unregister(self.memory.data_ptr())
        self.memory = torch.empty(0, dtype=torch.uint8)
        self._map = None  # unmapped with the last tensor over it
        os.close(self._descriptor)


class DeviceShare:
    """Memory of this rank's GPU, of so many bytes, which the other GPUs of the host read. torch.OutOfMemoryError,
    DriverError: there is not enough, or it cannot be shared."""

    def __init__(self, size: int, device: torch.device):
        torch.cuda.synchronize(device)  # the context exists, and is this thread's
        torch.cuda.empty_cache()  # what the allocator keeps for itself, the driver cannot give
        pointer, handle = ctypes.c_uint64(), MemoryHandle()
        self._size = max(size, 1)
        cuda_driver.call("cuMemAlloc_v2", ctypes.byref(pointer), self._size)
        self._pointer = pointer.value
        try:
            cuda_driver.call("cuIpcGetMemHandle", ctypes.byref(handle), self._pointer)
        except DriverError:
            self.close()
            raise
        self.memory = torch.as_tensor(self, device=device)
        self.address = f"device:{bytes(handle).hex()}"

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        return {"shape": (self._size,), "typestr": "|u1", "data": (self._pointer, False), "version": 3, "strides": None}

    def close(self) -> None:
        """Free it; nobody else may have it open any more, or use a tensor over it."""
        self.memory = torch.empty(0, dtype=torch.uint8)  # the tensor over it holds this object
        cuda_driver.call("cuMemFree_v2", self._pointer)


class OpenedAllocation:
    """Memory of another process's GPU, by the handle of its `DeviceShare`; DriverError: this GPU cannot read it."""

    def __init__(self, handle: str, device: torch.device):
        torch.cuda.synchronize(device)
        address = ctypes.c_uint64()
        given = MemoryHandle.from_buffer_copy(bytes.fromhex(handle))
        cuda_driver.call("cuIpcOpenMemHandle_v2", ctypes.byref(address), given, _LAZY_PEER_ACCESS)
        self._address = address.value

    def copy_to(self, target: torch.Tensor, start: int) -> None:
        """Copy the bytes from `start` on to (bytes,) uint8 on this rank's GPU, on the current stream."""
        stream = torch.cuda.current_stream(target.device).cuda_stream
        cuda_driver.call("cuMemcpyAsync", target.data_ptr(), self._address + start, target.numel(), stream)

    def close(self) -> None:
        """Let it go; no copy may be under way, and its owner keeps the memory."""
        if self._address:
            cuda_driver.call("cuIpcCloseMemHandle", self._address)
            self._address = 0


OtherShare = HostShare | OpenedAllocation


def open_share(address: str, device: torch.device) -> OtherShare:
    """Open what another rank of the host has made. OSError: it is gone. DriverError: this GPU cannot read it."""
    kind, where = address.split(":", 1)
    return OpenedAllocation(where, device) if kind == "device" else open_host_share(address)


def open_host_share(address: str) -> HostShare:
    """The same of memory of the host."""
    process, descriptor, size = map(int, address.split(":")[1:])
    return HostShare(size, os.open(f"/proc/{process}/fd/{descriptor}", os.O_RDWR | os.O_CLOEXEC))


def unfilled_bytes(address: str) -> int:
    """Of a share of the host's memory, what has no memory behind it yet; 0 where it is gone."""
    _, process, descriptor, size = address.split(":")
    try:
        there = os.stat(f"/proc/{process}/fd/{descriptor}").st_blocks * _STAT_BLOCK
    except OSError:
        return 0
    return max(0, int(size) - there)


def room_on_host() -> int:
    """Bytes of the host's memory that shares may have."""
    host = psutil.virtual_memory()
    return int(host.available - host.total // _LEFT_FREE)
