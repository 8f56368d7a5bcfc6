"""How fast a file comes out of the system's cache into memory that ranks share, beside reading its bytes once.

    python -m benchmarks.share_fill [--gib 4] [--folder FOLDER]

No GPU. Prints seconds of the clock and of all cores, the best of some, and whether the system has large pages for it.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch

from parallel_runtime.loading.reading import BUFFER, Piece, read
from parallel_runtime.streaming.share_memory import HostShare

_SETTING = Path("/sys/kernel/mm/transparent_hugepage/shmem_enabled")
_CPU = torch.device("cpu")


def _pieces(file: Path, target: torch.Tensor) -> list[Piece]:
    starts = range(0, target.numel(), BUFFER)
    return [Piece(file, start, torch.uint8, target[start : start + BUFFER]) for start in starts]


def _fill(file: Path, target: torch.Tensor) -> None:
    read(_pieces(file, target), _CPU, lambda done, total: None)


def _read_once(file: Path) -> None:
    buffer = memoryview(bytearray(BUFFER))
    with file.open("rb", buffering=0) as stream:
        while stream.readinto(buffer):
            pass


def _fill_fresh(file: Path, size: int) -> None:
    share = HostShare(size)
    _fill(file, share.memory)
    share.close()


def measure(file: Path, size: int, repeats: int = 3) -> dict[str, tuple[float, float]]:
    """Seconds of the clock and of all cores, the best of each, by what was done with a file of so many bytes."""
    warm = HostShare(size)
    _fill(file, warm.memory)
    ways: dict[str, Callable[[], None]] = {
        "read once": lambda: _read_once(file),
        "into a share that is there": lambda: _fill(file, warm.memory),
        "into a fresh share": lambda: _fill_fresh(file, size),
    }
    found = {}
    for name, run in ways.items():
        times = []
        for _ in range(repeats):
            began, cores = time.perf_counter(), time.process_time()
            run()
            times.append((time.perf_counter() - began, time.process_time() - cores))
        clock, cores = (min(column) for column in zip(*times, strict=True))
        found[name] = (clock, cores)
    warm.close()
    return found


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gib", type=float, default=4.0)
    parser.add_argument("--folder", type=Path, help="where the file lies for that long, on a disk")
    arguments = parser.parse_args()
    size = int(arguments.gib * 2**30)
    print(f"large pages for shared memory: {_SETTING.read_text().strip() if _SETTING.exists() else 'none'}")
    with tempfile.NamedTemporaryFile(dir=arguments.folder) as file:
        some = os.urandom(1 << 20)
        for start in range(0, size, len(some)):
            file.write(some[: size - start])
        file.flush()
        for name, (clock, cores) in measure(Path(file.name), size).items():
            print(f"{name:28} {clock:7.3f} s {size / clock / 1e9:6.1f} GB/s   cores {cores:7.3f} s")


if __name__ == "__main__":
    main()
