"""What each fault costs: what the artist reads, seconds until it is noticed, seconds until the next job succeeds.

    python -m benchmarks.fault_table            (prints the table of docs/reliability.md)

Pools of two CPU ranks whose engine fails on request (tests/workers/faulty_rank.py): the model's own load time is not
in the numbers. The stall bound is set to 3 s here; it is 60 s otherwise.
"""

from __future__ import annotations

import os
import re
import signal
import tempfile
import time
from collections.abc import Callable

import psutil

from parallel_runtime.errors import ParallelError
from tests.workers.conftest import FaultyPool
from workers.client.client import PoolClient
from workers.launch import PoolSpec

STALL_SECONDS = 3.0


def make_pool() -> FaultyPool:
    """A pool of two faulty ranks, started."""
    pool = FaultyPool(PoolClient(PoolSpec("cpu", (0, 1)), "tests.workers.faulty_rank"))
    pool.client.load(pool.model())
    return pool


def kill(pid: Callable[[FaultyPool], int]) -> Callable[[FaultyPool, Callable[[], None]], None]:
    """A fault that kills a process of the pool at step 2."""

    def cause(pool: FaultyPool, mark: Callable[[], None]) -> None:
        def on_progress(step: int, *_: object) -> None:
            if step == 2:
                mark()
                os.kill(pid(pool), signal.SIGKILL)

        pool.sample(steps=500, on_progress=on_progress)

    return cause


def inside(fault: str) -> Callable[[FaultyPool, Callable[[], None]], None]:
    """A fault inside of a rank, at a step (or in PREPARE, step -1)."""

    def cause(pool: FaultyPool, mark: Callable[[], None]) -> None:
        mark()
        pool.sample(fault, on_progress=lambda *_: mark())

    return cause


def out_of_memory(pool: FaultyPool, mark: Callable[[], None]) -> None:
    """A rank has no memory for the weights."""
    mark()
    pool.client.load(pool.model("oom 1 -1"))


FAULTS: dict[str, Callable[[FaultyPool, Callable[[], None]], None]] = {
    "an error in PREPARE on one rank": inside("raise 1 -1"),
    "out of memory while loading on one rank": out_of_memory,
    "an error at step 2 on one rank": inside("raise 1 2"),
    "an error at step 2 on all ranks": inside("raise * 2"),
    "out of memory at step 2 on one rank": inside("oom 1 2"),
    "a rank exits": inside("exit 1 2"),
    "a rank is killed (SIGKILL)": inside("kill 0 2"),
    "a rank crashes (SIGSEGV)": inside("segv 1 2"),
    "a rank is stopped (SIGSTOP)": inside("stop 1 2"),
    "a rank hangs": inside("hang 0 2"),
    "the supervisor is killed": kill(lambda pool: pool.pool.pid),
}


def shorten(text: str) -> str:
    """Numbers and paths that differ from run to run, replaced."""
    text = re.sub(r"process \d+", "process N", text)
    return re.sub(r"is /\S+\.log", "is LOG", text)


def idle_percent(pool: FaultyPool, seconds: float = 10.0) -> float:
    """Per cent of one core that an idle pool takes, all its processes together."""
    supervisor = psutil.Process(pool.pool.pid)
    processes = [supervisor, *supervisor.children(recursive=True)]

    def used() -> float:
        return sum(sum(process.cpu_times()[:2]) for process in processes)

    before = used()
    time.sleep(seconds)
    return (used() - before) / seconds * 100


def main() -> None:
    """Run every fault once and print the table."""
    os.environ["PARALLEL_DIT_STALL_SECONDS"] = str(STALL_SECONDS)
    with tempfile.TemporaryDirectory() as logs:
        os.environ["PARALLEL_DIT_LOGS"] = logs
        started = time.perf_counter()
        pool = make_pool()
        print(f"a fresh pool answers its first job after {time.perf_counter() - started:.1f} s")
        print(f"an idle pool takes {idle_percent(pool):.2f} % of a core\n")
        print("| fault | what the artist reads | noticed after | next job succeeds after |\n|---|---|---|---|")
        for name, cause in FAULTS.items():
            last = [time.perf_counter()]
            try:
                cause(pool, lambda last=last: last.__setitem__(0, time.perf_counter()))  # type: ignore[misc]
            except ParallelError as error:
                noticed = time.perf_counter() - last[0]
                pool.check_works()
                recovered = time.perf_counter() - last[0] - noticed
                print(f"| {name} | {shorten(str(error))} | {noticed:.1f} s | {recovered:.1f} s |", flush=True)
        pool.client.close()


if __name__ == "__main__":
    main()
