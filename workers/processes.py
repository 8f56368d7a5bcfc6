"""Starting torchrun and making sure that nothing of the pool outlives it."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import os
import signal
import time

import psutil

DUMP_STACKS = signal.SIGUSR1
"""Ranks answer it with the stacks of all their threads, in the log."""
POLL_SECONDS = 0.1
_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36


def become_subreaper() -> None:
    """Let orphaned ranks (torchrun killed) become this process's children, so that they can be found and ended."""
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def die_with_parent(parent: int) -> None:
    """Have the kernel end this process when its parent ends. `parent` is the pid it must still have."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:  # it ended before the call took effect
        os._exit(1)


async def spawn(command: list[str], environment: dict[str, str], cwd: str) -> asyncio.subprocess.Process:
    """Start torchrun with its output on a pipe; it ends with this process, and the ranks with it."""
    parent = os.getpid()
    return await asyncio.create_subprocess_exec(
        *command,
        env=environment,
        cwd=cwd,
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
        start_new_session=True,
        preexec_fn=lambda: die_with_parent(parent),
        limit=1 << 20,
    )


async def wait_for_end(process: asyncio.subprocess.Process) -> int:
    """Return its exit code as soon as it ends. `process.wait()` returns only when its output has ended as well, which
    children hold that are still there: ranks that have come no further than their imports."""
    while process.returncode is None:
        await asyncio.sleep(POLL_SECONDS)
    return process.returncode


async def end_descendants(grace_seconds: float) -> None:
    """End every process below this one: first asked, then killed. psutil checks create times, so no pid is mistaken."""
    deadline = time.monotonic() + grace_seconds
    for process in _descendants():
        with contextlib.suppress(psutil.NoSuchProcess):
            process.terminate()
            process.send_signal(signal.SIGCONT)  # a stopped process handles no SIGTERM
    while _descendants() and time.monotonic() < deadline:
        await asyncio.sleep(0.05)
    while remaining := _descendants():
        for process in remaining:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        await asyncio.sleep(0.02)


def is_descendant(pid: int) -> bool:
    """Whether a process was started, directly or not, by this one."""
    try:
        return any(parent.pid == os.getpid() for parent in psutil.Process(pid).parents())
    except psutil.NoSuchProcess:
        return False


def _descendants() -> list[psutil.Process]:
    """Living processes below this one. Dead ones that were handed to us as the subreaper are reaped on the way."""
    living = []
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            if process.status() != psutil.STATUS_ZOMBIE:
                living.append(process)
    return living
