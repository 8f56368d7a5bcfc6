"""Weights that have left a device, in the host's memory: one copy per host, which all ranks of a pool share.

A copy is an anonymous file in memory (memfd), made and filled by the rank that first lets the weights go. It says in
the pool's private folder where it is; others open it through /proc. So nothing is left behind however a pool ends.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
from collections.abc import Hashable, Iterator
from pathlib import Path

import psutil

from ..streaming.share_memory import HostShare, open_host_share

log = logging.getLogger(__name__)


def left_free(total: int) -> int:
    """Bytes of a host's memory that copies of weights leave, of so many that it has."""
    return max(8 << 30, total // 10)


class HostCopies:
    """The copies that this rank knows of, by what the weights were read from: their bytes as they lie in the region.
    Pinning one takes seconds, once; without, copies are slower. The folder is the pool's on this host; None: none."""

    def __init__(self, folder: Path | None):
        self._folder = folder
        self._open: dict[Hashable, HostShare] = {}

    def find(self, key: Hashable, size: int) -> HostShare | None:
        """A copy that is filled, this rank's or another's."""
        if key not in self._open and self._folder is not None:
            with contextlib.suppress(OSError):  # none there, not filled yet, or gone meanwhile
                address = self._path(key).with_suffix(".copy").read_text()
                if address.endswith(f":{size}"):
                    self._open[key] = open_host_share(address)
        return self._open.get(key)

    @contextlib.contextmanager
    def make(self, key: Hashable, size: int) -> Iterator[HostShare | None]:
        """A copy to be filled inside; others find it then. None: no memory for it, or another rank makes one."""
        if (copy := self._begin(key, size)) is None:
            yield None
            return
        self._open[key] = copy
        try:
            yield copy
            unfinished = self._path(key).with_suffix(".new")
            unfinished.write_text(copy.address)
            unfinished.rename(self._path(key).with_suffix(".copy"))
        except BaseException:
            self.drop(key)
            raise

    def _begin(self, key: Hashable, size: int) -> HostShare | None:
        host = psutil.virtual_memory()
        if self._folder is None or key in self._open:
            return None
        if host.available - size < left_free(host.total):
            log.info("No memory on the host to park %.1f GiB of weights: they will be read again.", size / 2**30)
            return None
        try:
            self._path(key).touch(0o600, exist_ok=False)
            return HostShare(size)
        except FileExistsError:  # another rank was first
            return None
        except OSError as error:
            log.warning("Weights are not parked on the host: %s", error)
            self._path(key).unlink(missing_ok=True)
            return None

    def drop(self, key: Hashable) -> None:
        """Let this rank's part of a copy go; its memory is free when every rank has. No tensor may lie over it."""
        if (copy := self._open.pop(key, None)) is None:
            return
        if copy.own:
            self._path(key).with_suffix(".copy").unlink(missing_ok=True)
            self._path(key).unlink(missing_ok=True)
        copy.close()

    def _path(self, key: Hashable) -> Path:
        assert self._folder is not None
        return self._folder / f"weights-{hashlib.sha256(repr(key).encode()).hexdigest()[:32]}"
