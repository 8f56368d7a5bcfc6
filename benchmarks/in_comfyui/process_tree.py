"""What a ComfyUI has started: the processes below it, which of them are ranks, and what they are at."""

from __future__ import annotations

import itertools
import shutil
import subprocess
from pathlib import Path

import psutil


def processes(pid: int) -> list[psutil.Process]:
    """Every process that one has started."""
    try:
        return psutil.Process(pid).children(recursive=True)
    except psutil.NoSuchProcess:
        return []


def ranks(pid: int) -> list[psutil.Process]:
    """The rank processes of all its pools."""
    return [process for process in processes(pid) if is_rank(process)]


def is_rank(process: psutil.Process) -> bool:
    """Whether it is a rank, and not the supervisor, which names the same module, or torchrun."""
    try:
        words = process.cmdline()
    except psutil.Error:
        return False
    return "torch.distributed.run" not in words and ("-m", "workers.rank") in itertools.pairwise(words)


def dump_stacks(pid: int, path: Path) -> None:
    """Append the stacks of a process and all that it has started to a file, where py-spy is installed."""
    if (tool := shutil.which("py-spy")) is None:
        return
    with path.open("a") as file:
        for one in [pid, *(process.pid for process in processes(pid))]:
            try:
                text = subprocess.run([tool, "dump", "--pid", str(one)], capture_output=True, text=True, timeout=10)
            except subprocess.TimeoutExpired:
                continue
            file.write(f"--- {one}\n{text.stdout}\n")
