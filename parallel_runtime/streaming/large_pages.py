"""Shared memory of the host in pages of 2 MiB, where the system allows it: filling it takes as long as its pages take.

Measured on a machine with two cores (benchmarks/share_fill.py), of 512 MiB out of the file cache: read into memory that
is there 0.04 s of a core, into fresh shared memory in pages of 4 KiB 0.43 to 0.55, into fresh private memory in large
ones 0.06. Filling by `write` or `sendfile`, making the pages beforehand (`fallocate`, MADV_POPULATE_WRITE), and more
threads cost as much as page faults do, or more.
"""

from __future__ import annotations

import contextlib
import mmap


def in_large_pages(memory: mmap.mmap) -> None:
    """Ask for them, before anything is written. The system gives them to shared memory where
    /sys/kernel/mm/transparent_hugepage/shmem_enabled is "advise" (or more); most have it on "never"."""
    with contextlib.suppress(OSError):  # a kernel without
        memory.madvise(mmap.MADV_HUGEPAGE)
