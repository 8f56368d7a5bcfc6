"""GPU memory that can be given back and taken again at the same addresses: the CUDA driver's virtual memory calls.

CUDA graphs and tensors keep addresses. Here the addresses of a region stay reserved, and only the memory behind them
comes and goes, so that recordings of a model outlive its weights (CUDA Driver API, "Virtual Memory Management").
"""

from __future__ import annotations

import sys
from ctypes import Structure, byref, c_int, c_size_t, c_ubyte, c_uint64, c_void_p
from typing import Any

import torch

from . import cuda_driver
from .cuda_driver import DriverError

CHUNK = 512 << 20
"""Bytes of one allocation; small enough that a device in use has as much in one piece."""

_PINNED, _DEVICE, _READ_AND_WRITE = 1, 1, 3  # CU_MEM_ALLOCATION_TYPE, CU_MEM_LOCATION_TYPE, CU_MEM_ACCESS_FLAGS
_RECOMMENDED = 1  # CUmemAllocationGranularity_flags
_VIRTUAL_MEMORY_SUPPORTED = 102  # CU_DEVICE_ATTRIBUTE


class _Location(Structure):
    """CUmemLocation."""

    _fields_ = (("type", c_int), ("id", c_int))


class _AllocationProperties(Structure):
    """CUmemAllocationProp."""

    _fields_ = (
        ("type", c_int),
        ("requestedHandleTypes", c_int),
        ("location", _Location),
        ("win32HandleMetaData", c_void_p),
        ("allocFlags", c_ubyte * 8),  # none
    )


class _Access(Structure):
    """CUmemAccessDesc."""

    _fields_ = (("location", _Location), ("flags", c_int))


class VirtualRegion:
    """A region of one GPU's addresses, with memory behind it or without. Made without.

    The object is what `torch.as_tensor` takes while there is memory. Tensors over it stay valid objects for ever, but
    touching them while there is none is an error that ends the process's use of CUDA.

    Args:
        size: bytes; rounded up to the device's granularity.
        device: a CUDA device with its index, as torch counts them: the driver counts the same visible devices.
        keeps_addresses: it comes back at the same addresses, so that CUDA graphs which read it stay valid.

    Raises:
        DriverError: this device or driver cannot do it.
    """

    keeps_addresses = True

    def __init__(self, size: int, device: torch.device, chunk: int = CHUNK):
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
        self._chunk = -(-chunk // step.value) * step.value
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
        """Put memory behind the addresses; what it holds is undefined. Nothing is done where there is some.

        Raises:
            torch.OutOfMemoryError: there is not enough; nothing is kept then.
            DriverError: a call failed otherwise; nothing is kept then.
        """
        if self._mapped:
            return
        torch.cuda.empty_cache()  # what the allocator keeps for itself, the driver cannot give
        try:
            for start in range(0, self.size, self._chunk):
                self._map(self._address + start, min(self._chunk, self.size - start))
            access = _Access(self._location, _READ_AND_WRITE)
            cuda_driver.call("cuMemSetAccess", self._address, self.size, byref(access), 1)
        except torch.OutOfMemoryError:
            self.give_back()
            raise torch.OutOfMemoryError(f"Tried to allocate {self.size / 2**30:.2f} GiB for weights.") from None
        except DriverError:
            self.give_back()
            raise

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
