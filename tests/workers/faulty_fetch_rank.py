"""A rank whose copies of a block fail or pause half-way, where a test asks for it while it runs."""

from __future__ import annotations

import os
import time
from pathlib import Path

import torch

from parallel_runtime.streaming.shared_blocks import SharedBlocks
from tests.workers.faulty_rank import fail
from workers.rank import start

_fetch = SharedBlocks.fetch


def fetch(self: SharedBlocks, block: int, slot: torch.Tensor) -> None:
    """Half a copy; then what the test wrote for this rank: "kill", or seconds to wait for."""
    asked = Path(os.environ["TEST_FETCH"]) / str(self.dealer.rank)
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
    start.main()
