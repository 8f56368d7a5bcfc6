"""The process of a rival: joins the others, lets the rival build itself, times it, leaves a row and the latent."""

from __future__ import annotations

import faulthandler
import json
import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import save_file

from .case import Case
from .task import Sampling, Task


class RivalError(Exception):
    """A rival cannot be measured here; the message says why, and becomes its line in the table."""


@dataclass(frozen=True)
class Engine:
    """A rival that is ready: its loop, and what the table says of its settings."""

    sample: Sampling
    settings: str


def main(build: Callable[[Task], Engine]) -> None:
    """Entry point of a rival's module: `python -m benchmarks.rivals.<module> FOLDER`, with RANK in the environment."""
    folder, rank = Path(sys.argv[1]), int(os.environ["RANK"])
    case = Case(**json.loads((folder / "case.json").read_text()))
    # The launcher ends us at the limit; this is for a launcher that was ended itself.
    faulthandler.dump_traceback_later(case.limit + 20, exit=True)
    try:
        with torch.no_grad():
            _measure(build, case, rank, folder)
    except Exception as error:  # the process's border: the launcher shows the reason
        told = str(error) if isinstance(error, RivalError) else f"{type(error).__name__}: {error}"
        (folder / f"reason-{rank}.txt").write_text(told)
        raise


def _measure(build: Callable[[Task], Engine], case: Case, rank: int, folder: Path) -> None:
    device = torch.device("cpu" if case.tiny else f"cuda:{rank}")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    if case.ranks > 1:
        dist.init_process_group(
            "gloo" if device.type == "cpu" else "cpu:gloo,cuda:nccl",
            init_method=f"file://{folder}/store",
            rank=rank,
            world_size=case.ranks,
            timeout=timedelta(seconds=case.limit),
        )
    task = Task(case, rank, device)
    engine = build(task)
    first_step = _warm(engine.sample, task)
    latent, seconds = _time(engine.sample, task)
    if rank == 0:
        row: dict[str, Any] = {
            "ms_per_step": 1000 * seconds / case.steps,
            "first_step_s": first_step,
            "settings": engine.settings,
            "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU",
            "peak_gib": torch.cuda.max_memory_allocated() / 2**30 if device.type == "cuda" else None,
        }
        save_file({"latent": latent.cpu().contiguous()}, folder / "latent.safetensors")
        (folder / "row.json").write_text(json.dumps(row))
    if case.ranks > 1:
        dist.barrier()  # a rank that leaves early breaks the others' connections
        dist.destroy_process_group()


def _warm(sample: Sampling, task: Task) -> float:
    """Compile, record; return the seconds that the first step took."""
    ends: list[float] = []

    def tick() -> None:
        if not ends:
            ends.append(_now(task.device))

    began = _now(task.device)
    sample(task.latent(), _sigmas(task, task.case.warm), tick)
    return ends[0] - began


def _time(sample: Sampling, task: Task) -> tuple[torch.Tensor, float]:
    """The latent, and the seconds for all of it, on this rank. No rival is made to wait between its steps."""
    x, sigmas = task.latent(), _sigmas(task, task.case.steps)
    if task.case.ranks > 1:
        dist.barrier()  # or this rank would be charged with what the others still do for the run before
    began = _now(task.device)
    latent = sample(x, sigmas, lambda: None)
    return latent, _now(task.device) - began


def _sigmas(task: Task, steps: int) -> torch.Tensor:
    return torch.linspace(1, 0, steps + 1, device=task.device)


def _now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()
