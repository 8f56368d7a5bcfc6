"""A rank whose copies of a block fail or pause half-way, where a test asks for it while it runs; as many blocks are
dealt beside those of the host as a configuration asks for."""

from __future__ import annotations

import os
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from parallel_runtime.config import ParallelConfig
from parallel_runtime.engine import prepared_load
from parallel_runtime.streaming.shared_blocks import SharedBlocks
from tests.workers.faulty_rank import fail
from workers.rank import start

_fetch = SharedBlocks.fetch
_choose = prepared_load.choose_weights


def choose_weights(config: ParallelConfig, *about: Any, **more: Any) -> ParallelConfig:
    """What is chosen, but for what is dealt."""
    return replace(_choose(config, *about, **more), dealt=config.dealt)


def fetch(self: SharedBlocks, block: int, slot: torch.Tensor) -> None:
    """Half a copy; then what the test wrote for this rank: "kill", or seconds to wait for."""
    asked = Path(os.environ["TEST_FETCH"]) / str(self.streaming.rank)
    if block == 1 and asked.exists():
        slot[: slot.numel() // 2].fill_(7)
        (asked.parent / "reached").touch()
        fault = asked.read_text()
        if fault == "kill":
            fail(fault, None)  # type: ignore[arg-type]
        time.sleep(float(fault))
    _fetch(self, block, slot)


if __name__ == "__main__":
    SharedBlocks.fetch = fetch  # type: ignore[method-assign]
    prepared_load.choose_weights = choose_weights
    start.main()
