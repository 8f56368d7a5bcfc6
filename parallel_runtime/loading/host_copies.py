"""Weights that have left a device, in the host's memory: one copy per host, which all ranks of a pool share.

A copy is an anonymous file in memory (memfd), made and filled by the rank that first lets the weights go. It says in
the pool's private folder where it is; others open it through /proc. So nothing is left behind however a pool ends.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
from collections.abc import Hashable, Iterator
from pathlib import Path

import psutil

from ..streaming.share_memory import HostShare

log = logging.getLogger(__name__)

_LEFT_FREE = 8 << 30
"""Bytes of the host's memory that copies leave, or a tenth of it where that is more."""


def left_free(total: int) -> int:
    """Bytes of a host's memory that copies of weights leave, of so many that it has."""
    return max(_LEFT_FREE, total // 10)


class HostCopy(HostShare):
    """The bytes of one model's weights as they lie in its region. Pinning takes seconds, once; without, copies are
    slower.

    Args:
        descriptor: of another rank's memory; None makes it.
        owned: the file that says that this rank has made it; None for a copy of another rank.
    """

    def __init__(self, size: int, descriptor: int | None = None, owned: Path | None = None):
        super().__init__(size, descriptor)
        self._owned = owned

    def publish(self) -> None:
        """It is filled: other ranks may read it."""
        assert self._owned is not None
        unfinished = self._owned.with_suffix(".new")
        unfinished.write_text(self.address)
        unfinished.rename(self._owned.with_suffix(".copy"))

    def close(self) -> None:
        """Let it go; the memory is free when every rank has. Nobody may hold a tensor over `memory`."""
        if self._owned is not None:
            self._owned.with_suffix(".copy").unlink(missing_ok=True)
            self._owned.unlink(missing_ok=True)
        super().close()


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
            process, descriptor, held = map(int, self._path(key).with_suffix(".copy").read_text().split(":")[1:])
            memory = os.open(f"/proc/{process}/fd/{descriptor}", os.O_RDWR | os.O_CLOEXEC)
        except OSError:
            return None  # none there, not filled yet, or gone meanwhile
        if held != size:
            os.close(memory)
            return None
        self._open[key] = HostCopy(size, memory)
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
            return HostCopy(size, owned=path)
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
