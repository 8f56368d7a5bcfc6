"""Weights that have left a device, in the host's memory: one copy per host, which all ranks of a pool share.

A copy is an anonymous file in memory (memfd), made and filled by the rank that first lets the weights go. It says in
the pool's private folder where it is; others open it through /proc. So nothing is left behind however a pool ends.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import mmap
import os
from collections.abc import Hashable, Iterator
from pathlib import Path

import psutil
import torch

from ..pinned_memory import register, unregister

log = logging.getLogger(__name__)

_LEFT_FREE = 8 << 30
"""Bytes of the host's memory that copies leave, or a tenth of it where that is more."""


def left_free(total: int) -> int:
    """Bytes of a host's memory that copies of weights leave, of so many that it has."""
    return max(_LEFT_FREE, total // 10)


class HostCopy:
    """The bytes of one model's weights as they lie in its region.

    Args:
        descriptor: of the memory; taken over.
        owned: the file that says that this rank has made it; None for a copy of another rank.
    """

    def __init__(self, descriptor: int, size: int, owned: Path | None):
        self._descriptor = descriptor
        self._owned = owned
        self._map: mmap.mmap | None = mmap.mmap(descriptor, size)
        self.memory = torch.frombuffer(self._map, dtype=torch.uint8)
        self._pinned = False

    def pin(self) -> None:
        """Let GPUs copy from it at the full speed of their link; takes seconds, once. Without, copies are slower."""
        if not self._pinned and torch.cuda.is_available():
            self._pinned = register(self.memory)

    def publish(self) -> None:
        """It is filled: other ranks may read it."""
        assert self._owned is not None
        unfinished = self._owned.with_suffix(".new")
        unfinished.write_text(f"{os.getpid()} {self._descriptor} {self.memory.nbytes}")
        unfinished.rename(self._owned.with_suffix(".copy"))

    def close(self) -> None:
        """Let it go; the memory is free when every rank has. Nobody may hold a tensor over `memory`."""
        if self._map is None:
            return
        if self._pinned:
            unregister(self.memory.data_ptr())
        if self._owned is not None:
            self._owned.with_suffix(".copy").unlink(missing_ok=True)
            self._owned.unlink(missing_ok=True)
        self.memory = torch.empty(0, dtype=torch.uint8)
        self._map = None  # unmapped with the last tensor over it
        os.close(self._descriptor)


class HostCopies:
    """The copies that this rank knows of, by what the weights were read from.

    Args:
        folder: private to the pool, on this host; None: there are no copies.
    """

    def __init__(self, folder: Path | None):
        self._folder = folder
        self._open: dict[Hashable, HostCopy] = {}

    def find(self, key: Hashable, size: int) -> HostCopy | None:
        """A copy that is filled, this rank's or another's."""
        if key in self._open or self._folder is None:
            return self._open.get(key)
        try:
            process, descriptor, held = map(int, self._path(key).with_suffix(".copy").read_text().split())
            memory = os.open(f"/proc/{process}/fd/{descriptor}", os.O_RDWR | os.O_CLOEXEC)
        except OSError:
            return None  # none there, not filled yet, or gone meanwhile
        if held != size:
            os.close(memory)
            return None
        self._open[key] = HostCopy(memory, size, owned=None)
        return self._open[key]

    @contextlib.contextmanager
    def make(self, key: Hashable, size: int) -> Iterator[HostCopy | None]:
        """A copy to be filled inside; others find it afterwards. None where there is no memory for it, or where another
        rank has made or makes one."""
        copy = self._begin(key, size)
        if copy is None:
            yield None
            return
        try:
            yield copy
            copy.publish()
        except BaseException:
            copy.close()
            raise
        self._open[key] = copy

    def _begin(self, key: Hashable, size: int) -> HostCopy | None:
        host = psutil.virtual_memory()
        if self._folder is None or key in self._open:
            return None
        if host.available - size < left_free(host.total):
            log.info("No memory on the host to park %.1f GiB of weights: they will be read again.", size / 2**30)
            return None
        path = self._path(key)
        try:
            os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600))
        except OSError:
            return None  # another rank was first
        try:
            descriptor = os.memfd_create("parallel-dit-weights", os.MFD_CLOEXEC)
            os.truncate(descriptor, size)
            return HostCopy(descriptor, size, path)
        except OSError as error:
            log.warning("Weights are not parked on the host: %s", error)
            path.unlink(missing_ok=True)
            return None

    def drop(self, key: Hashable) -> None:
        """Let this rank's part of a copy go."""
        copy = self._open.pop(key, None)
        if copy is not None:
            copy.close()

    def _path(self, key: Hashable) -> Path:
        assert self._folder is not None
        return self._folder / f"weights-{hashlib.sha256(repr(key).encode()).hexdigest()[:32]}"
