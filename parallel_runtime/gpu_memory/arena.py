"""The memory of one model's weights on a device: one region in which every tensor has its place, given back as one.

CUDA graphs and tensors keep addresses. On a GPU those of a region stay reserved, and only the memory behind them comes
and goes, so that recordings of a model outlive its weights (CUDA Driver API, "Virtual Memory Management").
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Mapping
from ctypes import Structure, byref, c_int, c_size_t, c_ubyte, c_uint64, c_void_p
from typing import Any

import torch

from . import cuda_driver
from .cuda_driver import DriverError

log = logging.getLogger(__name__)

ALIGNMENT = 512  # bytes; as PyTorch's allocator aligns, so that kernels for well aligned operands stay in use
_CHUNK = 512 << 20  # bytes of one allocation; small enough that a device in use has as much in one piece

_PINNED, _DEVICE, _READ_AND_WRITE = 1, 1, 3  # CU_MEM_ALLOCATION_TYPE, CU_MEM_LOCATION_TYPE, CU_MEM_ACCESS_FLAGS
_RECOMMENDED = 1  # CUmemAllocationGranularity_flags
_VIRTUAL_MEMORY_SUPPORTED = 102  # CU_DEVICE_ATTRIBUTE


def aligned(size: int) -> int:
    """Bytes, rounded up: a tensor or a piece that begins there begins with a whole number."""
    return -(-size // ALIGNMENT) * ALIGNMENT


def lay_out(sizes: Mapping[Any, int]) -> tuple[dict[Any, int], int]:
    """Places in a region for tensors of so many bytes, in their order: name -> first byte, and bytes of the region."""
    starts, end = dict[Any, int](), 0
    for name, size in sizes.items():
        starts[name] = aligned(end)
        end = starts[name] + size
    return starts, end


class _Location(Structure):  # CUmemLocation
    _fields_ = (("type", c_int), ("id", c_int))


class _AllocationProperties(Structure):  # CUmemAllocationProp
    _fields_ = (
        ("type", c_int), ("requestedHandleTypes", c_int), ("location", _Location), ("win32HandleMetaData", c_void_p),
        ("allocFlags", c_ubyte * 8),
    )  # fmt: skip


class _Access(Structure):  # CUmemAccessDesc
    _fields_ = (("location", _Location), ("flags", c_int))


class VirtualRegion:
    """So many bytes, rounded up, of one GPU's addresses, made without memory behind them. DriverError: this device or
    driver cannot do it. Tensors over it stay valid objects for ever, but touching them while there is no memory is an
    error that ends the process's use of CUDA."""

    keeps_addresses = True  # it comes back at the same addresses, so that CUDA graphs which read it stay valid

    def __init__(self, size: int, device: torch.device):
        self.device = device
        self._mapped: list[tuple[int, int]] = []
        self._address = 0
        torch.cuda.synchronize(device)  # the context exists
        ordinal, supported = c_int(), c_int()
        cuda_driver.call("cuDeviceGet", byref(ordinal), device.index)
        cuda_driver.call("cuDeviceGetAttribute", byref(supported), _VIRTUAL_MEMORY_SUPPORTED, ordinal.value)
        if not supported.value:
            raise DriverError(f"{device} has no virtual memory management.")
        self._location = _Location(_DEVICE, ordinal.value)
        self._properties = _AllocationProperties(type=_PINNED, location=self._location)
        step = c_size_t()
        cuda_driver.call("cuMemGetAllocationGranularity", byref(step), byref(self._properties), _RECOMMENDED)
        self.size = -(-max(size, 1) // step.value) * step.value
        self._chunk = -(-_CHUNK // step.value) * step.value
        address = c_uint64()
        cuda_driver.call("cuMemAddressReserve", byref(address), self.size, 0, 0, 0)
        self._address = address.value

    @property
    def memory(self) -> torch.Tensor:
        """(bytes,) uint8 on the device. Not to be read while it is given back, undefined afterwards."""
        return torch.as_tensor(self, device=self.device)  # not kept: it holds the region

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        return {"shape": (self.size,), "typestr": "|u1", "data": (self._address, False), "version": 3, "strides": None}

    def take(self) -> None:
        """Put memory behind the addresses, where there is none; what it holds is undefined. torch.OutOfMemoryError,
        DriverError: there is not enough, or a call failed otherwise; nothing is kept then."""
        if self._mapped:
            return
        torch.cuda.empty_cache()  # what the allocator keeps for itself, the driver cannot give
        try:
            for start in range(0, self.size, self._chunk):
                self._map(self._address + start, min(self._chunk, self.size - start))
            access = _Access(self._location, _READ_AND_WRITE)
            cuda_driver.call("cuMemSetAccess", self._address, self.size, byref(access), 1)
        except (torch.OutOfMemoryError, DriverError) as error:
            self.give_back()
            if isinstance(error, DriverError):
                raise
            raise torch.OutOfMemoryError(f"Tried to allocate {self.size / 2**30:.2f} GiB for weights.") from None

    def _map(self, address: int, size: int) -> None:
        handle = c_uint64()
        cuda_driver.call("cuMemCreate", byref(handle), size, byref(self._properties), 0)
        try:
            cuda_driver.call("cuMemMap", address, size, 0, handle.value, 0)
            self._mapped.append((address, size))
        finally:
            cuda_driver.call("cuMemRelease", handle.value)  # the memory lives as long as the mapping

    def give_back(self) -> None:
        """Return the memory to the system, at once, after what the GPU is doing; the addresses stay reserved."""
        if self._mapped:
            torch.cuda.synchronize(self.device)
        while self._mapped:
            cuda_driver.call("cuMemUnmap", *self._mapped.pop())

    def __del__(self) -> None:
        if sys.is_finalizing() or not self._address:
            return  # the process's end frees everything
        self.give_back()
        cuda_driver.call("cuMemAddressFree", self._address, self.size)


class PlainArena:
    """An arena of PyTorch's allocator, whose storage shrinks to nothing and grows again. Made with memory."""

    keeps_addresses = False

    def __init__(self, size: int, device: torch.device):
        self._size = size
        self.memory = torch.empty(size, dtype=torch.uint8, device=device)

    def take(self) -> None:
        storage = self.memory.untyped_storage()
        if not storage.nbytes():
            storage.resize_(self._size)

    def give_back(self) -> None:
        self.memory.untyped_storage().resize_(0)
        if self.memory.is_cuda:
            torch.cuda.empty_cache()


Arena = VirtualRegion | PlainArena


def make_arena(size: int, device: torch.device) -> Arena:
    """An arena with memory, if that is enough: of virtual memory where the device has it."""
    if device.type == "cuda" and torch.version.hip is None:
        try:
            region = VirtualRegion(size, device)
            region.take()
            return region
        except DriverError as error:
            log.warning("Recordings will go when weights go, as memory cannot be had at fixed addresses: %s", error)
    return PlainArena(size, device)


def place_tensor(arena: Arena, start: int, like: torch.Tensor) -> torch.Tensor:
    """A dense tensor of another's shape and type over the arena's bytes from `start` on."""
    own = arena.memory[start : start + like.nbytes]
    return own.view(like.dtype).as_strided(like.shape, torch.empty_like(like, device="meta").stride())
