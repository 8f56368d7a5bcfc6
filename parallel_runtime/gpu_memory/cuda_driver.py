"""Calls of the CUDA driver that PyTorch has no name for."""

from __future__ import annotations

import ctypes
import functools
from typing import Any

import torch

_OUT_OF_MEMORY = 2
_ADDRESS, _SIZE, _INT, _POINTER = ctypes.c_uint64, ctypes.c_size_t, ctypes.c_int, ctypes.c_void_p


class MemoryHandle(ctypes.Structure):
    """CUipcMemHandle."""

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
    """Call one of the driver's functions.

    Raises:
        torch.OutOfMemoryError: the device has no memory left.
        DriverError: any other error, or there is no driver, or it lacks one of the functions.
    """
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
