"""What a remote transformer call costs beside the transformer: FLUX.1 shapes at 1024 x 1024, no computing.

    python -m benchmarks.remote_call [--ranks 1] [--calls 200]

Prints the round trip with the text context in every call, and with the context known to the pool (as in a run).
"""

from __future__ import annotations

import argparse
import statistics
import time

import torch

from parallel_runtime.config import ParallelConfig
from workers.client.client import ModelRequest, PoolClient
from workers.launch import PoolSpec


def measure(client: PoolClient, model: ModelRequest, calls: int, new_context: bool) -> list[float]:
    """Milliseconds of each call; bf16 latent (1, 16, 128, 128), context (1, 512, 4096)."""
    x = torch.randn(1, 16, 128, 128).bfloat16()
    conditioning = {
        "context": torch.randn(1, 512, 4096).bfloat16(),
        "y": torch.randn(1, 768).bfloat16(),
        "guidance": torch.tensor([3.5]),
    }
    times = []
    for call in range(calls):
        if new_context:
            conditioning["context"] = conditioning["context"].clone()
            conditioning["context"][0, 0, 0] = call
        started = time.perf_counter()
        client.forward(model, x, torch.tensor([0.5]), conditioning)
        times.append((time.perf_counter() - started) * 1000)
    return times[calls // 10 :]


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--calls", type=int, default=200)
    arguments = parser.parse_args()
    config = ParallelConfig(devices=f"cpu:{arguments.ranks}")
    client = PoolClient(PoolSpec("cpu", tuple(range(arguments.ranks))), "benchmarks.null_rank")
    model = ModelRequest("none", "bfloat16", config)
    started = time.perf_counter()
    client.load(model)
    print(f"pool of {arguments.ranks} started and answered in {time.perf_counter() - started:.1f} s")
    for name, new_context in (("context in the pool", False), ("context sent every call", True)):
        times = sorted(measure(client, model, arguments.calls, new_context))
        print(
            f"{name:24} median {statistics.median(times):.2f} ms   90% {times[int(len(times) * 0.9)]:.2f} ms   "
            f"best {times[0]:.2f} ms"
        )
    client.close()


if __name__ == "__main__":
    main()
