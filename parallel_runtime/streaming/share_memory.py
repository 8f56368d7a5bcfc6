"""The memory of a rank's share, and that of another rank's: of the host, or of a GPU that others can read."""

from __future__ import annotations

import mmap
import os

import psutil
import torch

from ..errors import OutOfMemoryError
from ..gpu_memory.pinned_memory import MAPPED, register, unregister
from .peer_driver import DeviceShare, OpenedAllocation

_LEFT_FREE = 20
"""Shares leave this part of the host's memory."""
_STAT_BLOCK = 512
"""Bytes, as stat counts what a file has."""


class HostShare:
    """Memory of the host, an anonymous file (memfd), so that nothing is left behind however a pool ends. With another
    rank's descriptor it is that one's."""

    def __init__(self, size: int, descriptor: int | None = None):
        size = max(size, 1)
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


OwnShare = HostShare | DeviceShare
"""This rank's share; `address`: where other processes of the host find it, in words without spaces."""
OtherShare = HostShare | OpenedAllocation
"""Another rank's, open."""


def open_share(address: str, device: torch.device) -> OtherShare:
    """Open what another rank of the host has made.

    Raises:
        OSError: it is gone.
        DriverError: this GPU cannot read that one's memory.
    """
    kind, *where = address.split(":")
    if kind == "device":
        return OpenedAllocation(where[0], device)
    return open_host_share(address)


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


def too_little_on_host(wanted: int) -> OutOfMemoryError:
    """What is said of shares of so many bytes, of all ranks, which the host has no room for."""
    return OutOfMemoryError(
        "A share of the weights takes {wanted} GiB of the host's memory, of which {available} GiB are free.",
        "Close other programs, or choose spread as weights in Parallel Config.",
        wanted=f"{wanted / 2**30:.1f}",
        available=f"{psutil.virtual_memory().available / 2**30:.1f}",
    )
