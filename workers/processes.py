"""Ends processes, and sees to it that nothing of a pool outlives it."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import time

import psutil

DUMP_STACKS = signal.SIGUSR1
"""Ranks answer it with the stacks of all their threads, in the log."""
KILL_SECONDS = 5.0
_GRACE_POLL_SECONDS, _KILL_POLL_SECONDS = 0.05, 0.02
_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36


def become_subreaper() -> None:
    """Let orphaned ranks (of a killed torchrun) become this process's children, so that they can be found and ended."""
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def die_with_parent(parent: int) -> None:
    """Have the kernel end this process when its parent ends. `parent` is the pid it must still have."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:  # it ended before the call took effect
        os._exit(1)


def end_tree(pid: int, grace_seconds: float = 0.0, kill_seconds: float = KILL_SECONDS, *, itself: bool = True) -> None:
    """End a process, if `itself` is to end, and every process below it: asked, if there is grace, then killed.

    They are looked for again and again, as processes start others while they end; what was seen once stays in sight
    when its parent ends. psutil checks create times, so no pid is mistaken.

    Args:
        pid: of a child that nobody has waited for yet, so that the number is still its own; left to be waited for.
        kill_seconds: how long to wait for killed ones: one inside of a driver may take its time, and ends all the same.
    """
    root = psutil.Process(pid)
    tree = {root} if itself else set()

    def living() -> list[psutil.Process]:
        for process in (root, *tree):
            with contextlib.suppress(psutil.NoSuchProcess):
                tree.update(process.children(recursive=True))
        return [process for process in tree if _lives(process)]

    deadline = time.monotonic() + grace_seconds
    asked: set[psutil.Process] = set()
    while time.monotonic() < deadline and (remaining := living()):
        for process in set(remaining) - asked:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.terminate()
                process.send_signal(signal.SIGCONT)  # a stopped process handles no SIGTERM
        asked.update(remaining)
        time.sleep(_GRACE_POLL_SECONDS)
    deadline = time.monotonic() + kill_seconds
    while (remaining := living()) and time.monotonic() < deadline:
        for process in remaining:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        time.sleep(_KILL_POLL_SECONDS)


def is_descendant(pid: int) -> bool:
    """Whether a process was started, directly or not, by this one."""
    try:
        return any(parent.pid == os.getpid() for parent in psutil.Process(pid).parents())
    except psutil.NoSuchProcess:
        return False


def _lives(process: psutil.Process) -> bool:
    """Whether it has not ended. A dead child that nobody has reaped yet has."""
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
