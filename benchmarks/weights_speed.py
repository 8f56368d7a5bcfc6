"""How fast weights come and go: from the file, to the host, back from there, and back to the system.

    python -m benchmarks.weights_speed MODEL [--device cuda:0] [--dtype bfloat16]

Run it twice to have the file in the system's cache. One process; ranks of a pool do the same side by side.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch

from parallel_runtime import memory
from parallel_runtime.loading.arena import make_arena
from parallel_runtime.loading.checkpoint import open_checkpoint
from parallel_runtime.loading.held_weights import ArenaWeights
from parallel_runtime.loading.host_copies import HostCopies
from parallel_runtime.loading.weights import build_transformer, check_weights, hold_weights


def _ignore(done: int, total: int) -> None:
    """Nobody waits."""


def main() -> None:
    """Measure and print, one line for each way."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--device", type=torch.device, default=torch.device("cuda", 0))
    parser.add_argument("--dtype", default="bfloat16")
    arguments = parser.parse_args()
    device = arguments.device
    checkpoint = open_checkpoint(arguments.model)
    module = build_transformer(checkpoint)
    rules = check_weights(module, checkpoint)
    weights = hold_weights(module, checkpoint, rules, getattr(torch, arguments.dtype), device, make_arena)
    assert isinstance(weights, ArenaWeights)
    print(
        f"{checkpoint.spec.title}, {weights.size / 1e9:.1f} GB on {device}, addresses kept: {weights.keeps_addresses}"
    )

    def timed(what: str, run: Callable[[], object]) -> None:
        started = time.perf_counter()
        run()
        seconds = time.perf_counter() - started
        free = memory.free_bytes(device) / 1e9
        print(f"{what:28} {seconds:7.2f} s {weights.size / seconds / 1e9:8.1f} GB/s   {free:7.1f} GB free")

    timed("from the file", lambda: weights.fill(_ignore))
    with tempfile.TemporaryDirectory() as folder:
        copies = HostCopies(Path(folder))
        with copies.make("weights", weights.size) as copy:
            if copy is None:
                print("The host has no memory for a copy.")
                return
            timed("to the host", lambda: weights.save(copy.memory, _ignore))
        timed("back to the system", weights.give_back)
        timed("pinning the copy, once", copy.pin)
        timed("from the host", lambda: weights.restore(copy.memory, _ignore))
        weights.give_back()
        timed("from the host, again", lambda: weights.restore(copy.memory, _ignore))
        weights.give_back()
        timed("from the file, again", lambda: weights.fill(_ignore))
        copies.drop("weights")


if __name__ == "__main__":
    main()
