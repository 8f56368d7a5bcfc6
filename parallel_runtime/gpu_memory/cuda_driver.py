"""Calls of CUDA that PyTorch has no name for: the driver's, and those that pin memory of the host."""

from __future__ import annotations

import contextlib
import ctypes
import functools
from collections.abc import Iterator
from typing import Any

import torch

_OUT_OF_MEMORY = 2
_ADDRESS, _SIZE, _INT, _POINTER = ctypes.c_uint64, ctypes.c_size_t, ctypes.c_int, ctypes.c_void_p


class MemoryHandle(ctypes.Structure):  # CUipcMemHandle
    _fields_ = (("reserved", ctypes.c_char * 64),)


_SIGNATURES: dict[str, tuple[Any, ...]] = {
    "cuGetErrorString": (_INT, _POINTER),
    "cuDeviceGet": (_POINTER, _INT),
    "cuDeviceGetAttribute": (_POINTER, _INT, _INT),
    "cuMemGetAllocationGranularity": (_POINTER, _POINTER, _INT),
    "cuMemAddressReserve": (_POINTER, _SIZE, _SIZE, _ADDRESS, ctypes.c_uint64),
    "cuMemAddressFree": (_ADDRESS, _SIZE),
    "cuMemCreate": (_POINTER, _SIZE, _POINTER, ctypes.c_uint64),
    "cuMemRelease": (ctypes.c_uint64,),
    "cuMemMap": (_ADDRESS, _SIZE, _SIZE, ctypes.c_uint64, ctypes.c_uint64),
    "cuMemUnmap": (_ADDRESS, _SIZE),
    "cuMemSetAccess": (_ADDRESS, _SIZE, _POINTER, _SIZE),
    "cuMemAlloc_v2": (_POINTER, _SIZE),
    "cuMemFree_v2": (_ADDRESS,),
    "cuIpcGetMemHandle": (_POINTER, _ADDRESS),
    "cuIpcOpenMemHandle_v2": (_POINTER, MemoryHandle, ctypes.c_uint),
    "cuIpcCloseMemHandle": (_ADDRESS,),
    "cuMemcpyAsync": (_ADDRESS, _ADDRESS, _SIZE, _POINTER),
    "cuMemHostGetDevicePointer_v2": (_POINTER, _POINTER, ctypes.c_uint),
    "cuStreamWaitValue32_v2": (_POINTER, _ADDRESS, ctypes.c_uint32, ctypes.c_uint),
    "cuStreamWriteValue32_v2": (_POINTER, _ADDRESS, ctypes.c_uint32, ctypes.c_uint),
}


class DriverError(RuntimeError):
    """A call of the driver failed, or there is none; in its words."""


def call(name: str, *arguments: Any) -> None:
    """Call one of the driver's functions. torch.OutOfMemoryError: the device has no memory left. DriverError: any other
    error, or there is no driver, or it lacks one of the functions."""
    code = getattr(_library(), name)(*arguments)
    if code == _OUT_OF_MEMORY:
        raise torch.OutOfMemoryError(f"{name}: the device is out of memory.")
    if code:
        text = ctypes.c_char_p()
        _library().cuGetErrorString(code, ctypes.byref(text))
        raise DriverError(f"{name} failed with error {code} ({(text.value or b'unknown').decode()}).")


@functools.cache
def _library() -> ctypes.CDLL:
    try:
        library = ctypes.CDLL("libcuda.so.1")
        for name, arguments in _SIGNATURES.items():
            function = getattr(library, name)
            function.argtypes, function.restype = arguments, _INT
    except (OSError, AttributeError) as error:
        raise DriverError(f"The CUDA driver cannot be called: {error}.") from error
    return library


PORTABLE = 1  # cudaHostRegisterPortable: pinned for every device of the process
MAPPED = 2  # cudaHostRegisterMapped: a GPU's streams wait for words in it and write them, too


def register(memory: torch.Tensor, flags: int = 0) -> bool:
    """Pin memory (whole, contiguous) that PyTorch's allocator did not give out; returns whether that worked. Where not,
    copies are slower. Who registers lets go (`unregister`) before the memory is unmapped: its addresses are taken for
    others, for which this would fail."""
    if int(torch.cuda.cudart().cudaHostRegister(memory.data_ptr(), memory.nbytes, flags)) == 0:
        return True
    # CUDA's runtime tells of a call that failed at the next launch, whatever that is: it is this one.
    with contextlib.suppress(RuntimeError):
        torch.ones(1, device="cuda")
    return False


def unregister(address: int) -> None:
    """Let go of memory that was registered, by the address of its first byte."""
    torch.cuda.cudart().cudaHostUnregister(address)


@contextlib.contextmanager
def pinned(memory: torch.Tensor) -> Iterator[bool]:
    """Inside, memory is registered, if that works. Not by PyTorch's allocator, which would keep it pinned for ever."""
    registered = register(memory)
    try:
        yield registered
    finally:
        if registered:
            unregister(memory.data_ptr())
