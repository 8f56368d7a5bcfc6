"""A rank of the doctor's link check: joins a process group as the pool's ranks do, and runs collectives.

Started by torchrun in the pool's environment. It ends with torchrun, and when its standard input ends, which the
doctor holds the other side of: whatever happens to the doctor, no rank stays behind.
"""

from __future__ import annotations

import datetime
import os
import shutil
import signal
import threading
from collections.abc import Callable
from pathlib import Path

import psutil

from ..launch import TORCHRUN, PoolSpec
from ..link_result import Journal, Rates
from ..processes import die_with_parent

Check = Callable[[PoolSpec, int, Path, Journal], "list[Rates]"]

_JOIN_SECONDS = 600.0  # the doctor's own limit is shorter; this one only ends ranks that nobody watches any more
_GPU_MEGABYTES, _CPU_MEGABYTES = 64, 8
_GPU_REPEATS, _CPU_REPEATS = 20, 4
_TRIES = 100


def end_with_stdin(directory: Path, torchrun: int) -> None:
    """Wait for the end of standard input, then leave nothing behind. Body of a thread.

    torchrun goes too, and all ranks with it: without the folder it would wait for minutes for its rendezvous.
    """
    while os.read(0, 64):
        pass
    for _ in range(_TRIES):  # another rank may write into the folder while it is being emptied
        shutil.rmtree(directory, ignore_errors=True)
        if not directory.exists():
            break
    os.kill(torchrun, signal.SIGKILL)
    os._exit(1)


def run_collectives(spec: PoolSpec, rank: int, directory: Path, journal: Journal) -> list[Rates]:
    """Join, then check every backend that the pool would use: gloo, and NCCL on GPUs."""
    journal.stage("importing torch")
    import torch
    import torch.distributed as dist

    from .collectives import check_and_measure

    cpu = torch.device("cpu")
    on_gpu = spec.device_type == "cuda"
    device = torch.device("cuda", spec.devices[rank]) if on_gpu else cpu
    if on_gpu:
        journal.stage(f"taking GPU {device.index}")
        torch.cuda.set_device(device)
        torch.zeros(1, device=device)
    journal.stage("joining the process group")
    dist.init_process_group(
        backend="cpu:gloo,cuda:nccl" if on_gpu else "cpu:gloo",
        store=dist.FileStore(str(directory / "store"), spec.world_size),
        rank=rank,
        world_size=spec.world_size,
        timeout=datetime.timedelta(seconds=_JOIN_SECONDS),
    )
    rates = []
    if on_gpu:
        journal.stage("in the collectives of NCCL")
        rates.append(check_and_measure(device, "NCCL", _GPU_MEGABYTES, _GPU_REPEATS))
    journal.stage("in the collectives of gloo")
    rates.append(check_and_measure(cpu, "gloo", _CPU_MEGABYTES, _CPU_REPEATS))
    journal.stage("leaving the process group")
    dist.barrier()  # a rank that leaves early breaks the others' connections
    dist.destroy_process_group()
    return rates


def main(check: Check = run_collectives) -> None:
    """Process entry, under torchrun. `check` lets tests put faults in."""
    torchrun = os.getppid()
    die_with_parent(torchrun)  # so that the number is torchrun's as long as this process lives
    if TORCHRUN not in psutil.Process(torchrun).cmdline():  # it ended before: this is who takes in orphans
        os._exit(1)
    rank, directory = int(os.environ["RANK"]), Path(os.environ["PARALLEL_DIT_POOL"])
    threading.Thread(target=end_with_stdin, args=(directory, torchrun), name="end-with-stdin", daemon=True).start()
    journal = Journal(directory, rank)
    try:
        rates = check(PoolSpec.parse(os.environ["PARALLEL_DIT_DEVICES"]), rank, directory, journal)
    except Exception as error:
        journal.failure(error)
        raise
    journal.rates(rates)


if __name__ == "__main__":
    main()
