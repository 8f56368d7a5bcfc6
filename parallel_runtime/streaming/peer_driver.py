"""Memory of one GPU that other processes copy from: the CUDA driver's IPC handles, and its copies by address.

PyTorch would give a tensor over another GPU's memory that GPU's device, and a copy a context on it. The driver takes
addresses; its copies are launched on a stream, and recorded, like any.
"""

from __future__ import annotations

import ctypes
import itertools
import os
from typing import Any

import torch

from ..gpu_memory import cuda_driver
from ..gpu_memory.cuda_driver import DriverError, MemoryHandle

_LAZY_PEER_ACCESS = 1


def reach_one_another() -> bool:
    """Whether all GPUs that this process sees can read each other's memory, as far as they are to: every rank of them
    finds the same."""
    if os.environ.get("NCCL_P2P_DISABLE") == "1":
        return False
    return all(
        torch.cuda.can_device_access_peer(index, other)
        for index, other in itertools.permutations(range(torch.cuda.device_count()), 2)
    )


class DeviceShare:
    """Memory of this rank's GPU, of so many bytes, which the other GPUs of the host read.

    Raises:
        torch.OutOfMemoryError: there is not enough.
        DriverError: it cannot be shared.
    """

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

    def copy_to(self, target: torch.Tensor, start: int) -> None:
        """Copy bytes from `start` on, within the device."""
        target.copy_(self.memory[start : start + target.numel()], non_blocking=True)

    def pin(self) -> None:
        """Nothing."""

    def close(self) -> None:
        """Free it; nobody else may have it open any more, or use a tensor over it."""
        self.memory = torch.empty(0, dtype=torch.uint8)  # the tensor over it holds this object
        if self._pointer:
            cuda_driver.call("cuMemFree_v2", self._pointer)
            self._pointer = 0


class OpenedAllocation:
    """Memory of another process's GPU, by the handle of its `DeviceShare`.

    Raises:
        DriverError: this GPU cannot read it.
    """

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

    def pin(self) -> None:
        """Nothing: it is a GPU's."""

    def close(self) -> None:
        """Let it go; no copy may be under way, and its owner keeps the memory."""
        if self._address:
            cuda_driver.call("cuIpcCloseMemHandle", self._address)
            self._address = 0
