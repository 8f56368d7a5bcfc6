"""How much memory processes hold: of GPUs as the driver says, of the machine (RSS) where there is none."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import psutil

from workers.driver import processes_by_gpu

from .process_tree import ranks
from .server import Server

COMFYUI, RANK = "ComfyUI", "rank"


def measure(server: Server, cpu: bool) -> dict[str, float]:
    """GiB by process: "ComfyUI", "rank 0", "rank 1", and so on in the order of their ids."""
    held = _resident(server) if cpu else _on_gpus()
    pids = sorted(process.pid for process in ranks(server.pid))
    names = {server.pid: COMFYUI, **{pid: f"{RANK} {number}" for number, pid in enumerate(pids)}}
    return {names[pid]: round(size / 1024, 2) for pid, size in sorted(held.items()) if pid in names}


def _on_gpus() -> dict[int, float]:
    """Process -> MiB on all GPUs."""
    held: dict[int, float] = {}
    for processes in processes_by_gpu().values():
        for pid, size in processes.items():
            held[pid] = held.get(pid, 0.0) + size / 1024**2
    return held


@contextmanager
def peaks(server: Server, cpu: bool, every: float = 0.4) -> Iterator[dict[str, float]]:
    """The most that each process held while the block ran: a dict that is filled meanwhile."""
    most: dict[str, float] = {}
    over = threading.Event()

    def watch() -> None:
        while True:
            for name, size in measure(server, cpu).items():
                most[name] = max(size, most.get(name, 0.0))
            if over.wait(every):
                return

    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    try:
        yield most
    finally:
        over.set()
        watcher.join()


def after_unload(server: Server, cpu: bool, seconds: float = 3.0) -> tuple[dict[str, float], float | None]:
    """Poll for some seconds after /free.

    Returns:
        What is held at the end, and after how many seconds all ranks were below 1.5 GiB: None where they never were,
        or there is none.
    """
    began, low = time.monotonic(), None
    while True:
        held = measure(server, cpu)
        passed = time.monotonic() - began
        ranks = [size for name, size in held.items() if name.startswith(RANK)]
        if low is None and ranks and max(ranks) < 1.5:
            low = passed
        if passed >= seconds:
            return held, low
        time.sleep(0.1)


def _resident(server: Server) -> dict[int, float]:
    held = {}
    for process in [psutil.Process(server.pid), *ranks(server.pid)]:
        try:
            held[process.pid] = process.memory_info().rss / 1024**2
        except psutil.Error:
            continue
    return held
