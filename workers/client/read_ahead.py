"""Brings a model's files into the system's file cache while the ranks that will read them start."""

from __future__ import annotations

import contextlib
import os
import threading

import psutil

from parallel_runtime.errors import ParallelError
from parallel_runtime.loading.files import find_files

_STEP = 128 << 10
"""Bytes of one request. The kernel brings no more at a time than a device reads ahead, and forgets the rest."""


def begin_reading(path: str) -> threading.Thread:
    """Have the system read a model's files, at most half of the memory that is available, in a thread that ends by
    itself. What is cached already costs nothing; what is wrong with a file, the ranks will say.

    Args:
        path: a file or folder, as for `find_files`.
    """
    thread = threading.Thread(target=_ask_for, args=(path,), name="parallel-dit-read-ahead", daemon=True)
    thread.start()
    return thread


def _ask_for(path: str) -> None:
    left = psutil.virtual_memory().available // 2
    with contextlib.suppress(ParallelError, OSError):
        for file in find_files(path).weights:
            with file.open("rb") as opened:
                size = min(left, os.fstat(opened.fileno()).st_size)
                for start in range(0, size, _STEP):
                    os.posix_fadvise(opened.fileno(), start, _STEP, os.POSIX_FADV_WILLNEED)
            left -= size
