"""Brings a file into the system's cache with a few threads, and tells how far it is.

Who reads a mapped file, as the pack of GGUF files does, tells nobody how far it is, and a rank that shows no progress
for a minute counts as stalled.
"""

from __future__ import annotations

import itertools
import os
import threading
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path

from ..errors import CheckpointError
from ..said import said
from .reading import THREADS, OnBytes

_PIECE = 16 << 20
_POLL_SECONDS = 0.1


def read_through(path: Path, on_bytes: OnBytes) -> None:
    """Read all of a file; `on_bytes` hears of it ten times a second, and may raise to give up.

    Raises:
        CheckpointError: it cannot be read.
    """
    total = path.stat().st_size
    starts = itertools.count(0, _PIECE)
    turn = threading.Lock()
    stop = threading.Event()
    read = [0] * THREADS

    def work(number: int) -> None:
        buffer = bytearray(_PIECE)
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            while not stop.is_set():
                with turn:
                    start = next(starts)
                if start >= total:
                    return
                read[number] += os.preadv(descriptor, [buffer], start)
        finally:
            os.close(descriptor)

    with ThreadPoolExecutor(THREADS, thread_name_prefix="read through") as threads:
        running = {threads.submit(work, number) for number in range(THREADS)}
        try:
            while running:
                done, running = wait(running, timeout=_POLL_SECONDS, return_when="FIRST_EXCEPTION")
                for future in done:
                    future.result()
                on_bytes(min(sum(read), total), total)
        except OSError as error:
            raise CheckpointError(
                said("{path} cannot be read: {strerror}.", path=path, strerror=error.strerror), "Check the disk."
            ) from error
        finally:
            stop.set()
