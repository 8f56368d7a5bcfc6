"""Nothing of a pool outlives it: processes are ended, and private folders removed, also those of a process that was
killed. A folder belongs to whoever holds the lock on it, which the kernel lets go of when its last holder ends, and
shows in every PID namespace."""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import os
import shutil
import signal
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import psutil

from parallel_runtime.errors import PoolError

DUMP_STACKS = signal.SIGUSR1  # ranks answer it with the stacks of all their threads, in the log
KILL_SECONDS = 5.0
_POLL_SECONDS = 0.02
_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_ROOM_BYTES = 64 << 10  # what a start writes there, at least: the ranks' meeting place
_PREFIX = "parallel-dit-run-"
"""Not that of older versions, whose folders have no lock: whether one of theirs lives cannot be told."""


def become_subreaper() -> None:
    """Let orphaned ranks (of a killed torchrun) become this process's children, so that they can be found and ended."""
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def die_with_parent(parent: int) -> None:
    """Have the kernel end this process when its parent ends. `parent` is the pid it must still have."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:  # it ended before the call took effect
        os._exit(1)


def end_tree(pid: int, grace_seconds: float = 0.0, kill_seconds: float = KILL_SECONDS, *, itself: bool = True) -> None:
    """End a process, if `itself` is to end, and every process below it: asked, if there is grace, then killed, and
    waited for: one inside of a driver may take its time, and ends all the same.

    They are looked for again and again, as processes start others while they end; what was seen once stays in sight
    when its parent ends. psutil checks create times, so no pid is mistaken; `pid` is of a child that nobody has waited
    for yet, so that the number is still its own, and is left to be waited for."""
    root = psutil.Process(pid)
    tree = {root} if itself else set()

    def living() -> list[psutil.Process]:
        for process in (root, *tree):
            with contextlib.suppress(psutil.NoSuchProcess):
                tree.update(process.children(recursive=True))
        found = []
        for process in tree:
            with contextlib.suppress(psutil.NoSuchProcess):
                if process.is_running() and process.status() != psutil.STATUS_ZOMBIE:  # a dead child, not reaped yet
                    found.append(process)
        return found

    patience = time.monotonic() + grace_seconds
    asked: set[psutil.Process] = set()
    while (remaining := living()) and (now := time.monotonic()) < patience + kill_seconds:
        for process in remaining:
            with contextlib.suppress(psutil.NoSuchProcess):
                if now >= patience:
                    process.kill()
                elif process not in asked:
                    process.terminate()
                    process.send_signal(signal.SIGCONT)  # a stopped process handles no SIGTERM
        asked.update(remaining)
        time.sleep(_POLL_SECONDS)


def is_descendant(pid: int) -> bool:
    """Whether a process was started, directly or not, by this one."""
    with contextlib.suppress(psutil.NoSuchProcess):
        return any(parent.pid == os.getpid() for parent in psutil.Process(pid).parents())
    return False


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

    def close(self) -> None:
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
        folder.close()
        raise


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
