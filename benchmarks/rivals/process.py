"""A rank of a case: `python -m benchmarks.rivals.process FOLDER MODULE ...`, started by launch.py.

The modules are imported at once, which takes long and needs no GPU, so that it can be done while another case still
measures. The first is the rival's.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import os
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch

from .measure import Engine, main
from .task import Task


def run(folder: Path, modules: list[str]) -> None:
    """Import, wait for case.json, measure."""
    launcher = os.getppid()
    for module in modules:
        with contextlib.suppress(ImportError):  # it comes again where it is told
            importlib.import_module(module)
    while not (folder / "case.json").exists():
        if os.getppid() != launcher:
            return
        time.sleep(0.02)
    sys.argv[1:] = [str(folder)]
    main(_with_memory(modules[0], folder))


def _with_memory(rival: str, folder: Path) -> Callable[[Task], Engine]:
    """A rival that writes down what a GPU holds: with the weights alone, and at most while it samples."""

    def built(task: Task) -> Engine:
        engine: Engine = importlib.import_module(rival).build(task)
        if task.device.type != "cuda":
            return engine
        gc.collect()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        weights = torch.cuda.memory_allocated() / 2**30

        def sample(x: torch.Tensor, sigmas: torch.Tensor, tick: Callable[[], None]) -> torch.Tensor:
            latent = engine.sample(x, sigmas, tick)
            told = {"weights_gib": weights, "peak_gib": torch.cuda.max_memory_allocated() / 2**30}
            (folder / f"memory-{task.rank}.json").write_text(json.dumps(told))
            return latent

        return replace(engine, sample=sample)

    return built


if __name__ == "__main__":
    run(Path(sys.argv[1]), sys.argv[2:])
