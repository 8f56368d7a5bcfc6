"""Private folders: made, owned, and removed again, also those of a process that was killed. A folder belongs to whoever
holds the lock on it, which the kernel lets go of when its last holder ends, and shows in every PID namespace."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from parallel_runtime.errors import PoolError

_ROOM_BYTES = 64 << 10
"""What a start writes there, at least: the ranks' meeting place."""
_PREFIX = "parallel-dit-run-"
"""Not that of older versions, whose folders have no lock: whether one of theirs lives cannot be told."""


@dataclass
class PrivateFolder:
    """A folder of mode 0700. `descriptor` holds the lock; a child that inherits it holds the folder as well, after
    `let_go` alone."""

    path: Path
    descriptor: int

    def let_go(self) -> None:
        """Hold it no longer. It stays until those who inherited it have ended."""
        if self.descriptor >= 0:
            os.close(self.descriptor)
            self.descriptor = -1

    def remove(self) -> None:
        """Remove it with all that is in it."""
        shutil.rmtree(self.path, ignore_errors=True)
        self.let_go()


def make_folder() -> PrivateFolder:
    """Make one, below $TMPDIR, when those that nobody holds are gone; PoolError where nothing can be written there."""
    remove_leftovers()
    try:
        while True:
            path = Path(tempfile.mkdtemp(prefix=_PREFIX))
            with contextlib.suppress(FileNotFoundError):  # another process took it for a leftover before it was locked
                descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
                with contextlib.suppress(OSError):  # a file system without locks: nobody removes it but its owner
                    fcntl.flock(descriptor, fcntl.LOCK_EX)
                if path.exists():
                    folder = PrivateFolder(path, descriptor)
                    _try_room(folder)
                    return folder
                os.close(descriptor)
    except OSError as error:
        where = f" in {tempfile.tempdir}" if tempfile.tempdir else ""
        what = "No folder for temporary files could be made{where}: {strerror}."
        fix = "Make room there, or set $TMPDIR to a folder that can be written."
        raise PoolError(what, fix, where=where, strerror=error.strerror or error) from error


def _try_room(folder: PrivateFolder) -> None:
    """A folder can be made where no file can: found here, with its cause, and not by some process of the pool."""
    probe = folder.path / "room"
    try:
        probe.write_bytes(bytes(_ROOM_BYTES))
        probe.unlink()
    except OSError:
        folder.remove()
        raise


@contextlib.contextmanager
def private_folder() -> Iterator[Path]:
    """A folder for as long as the block runs."""
    folder = make_folder()
    try:
        yield folder.path
    finally:
        folder.remove()


def remove_leftovers() -> None:
    """Remove folders of this user that nobody holds."""
    with contextlib.suppress(OSError):  # no folder for temporary files: `make_folder` says so
        for path in Path(tempfile.gettempdir()).glob(f"{_PREFIX}*"):
            with contextlib.suppress(OSError):
                _remove_if_free(path)


def _remove_if_free(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        if os.fstat(descriptor).st_uid == os.getuid():
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)  # BlockingIOError: somebody holds it
            shutil.rmtree(path, ignore_errors=True)
    finally:
        os.close(descriptor)
