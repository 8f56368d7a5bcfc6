"""Real out-of-memory on a GPU: while loading, and at a step of one rank; then the next job works.

python -m benchmarks.gpu_out_of_memory --scratch /dev/shm          (writes a 24 GB checkpoint there)
"""

from __future__ import annotations

import argparse
import time
from dataclasses import replace
from pathlib import Path

import torch

from parallel_runtime.config import ParallelConfig
from parallel_runtime.errors import OutOfMemoryError
from workers.client.client import ModelRequest
from workers.client.pool_registry import close_pools, get_pool

from .flux_checkpoint import write_random_flux
from .flux_step import inputs


def occupy(left: float) -> torch.Tensor:
    """Take all memory of GPU 0 but `left` GiB."""
    torch.cuda.empty_cache()
    free, _ = torch.cuda.mem_get_info(0)
    return torch.empty(int(free - left * 2**30), dtype=torch.uint8, device="cuda:0")


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--scratch", type=Path, default=Path("/dev/shm"))
    path = parser.parse_args().scratch / "flux-dev-random.safetensors"
    if not path.exists():
        write_random_flux(path)
    config = ParallelConfig(devices="0")
    model = ModelRequest(str(path), "bfloat16", config)
    pool = get_pool(config)
    pool.start()

    def forward(size: int) -> None:
        given = inputs(size)
        conditioning = {name: given[name] for name in ("context", "y", "guidance")}
        output = pool.forward(model, given["x"].bfloat16(), torch.tensor([0.5]), conditioning)
        assert torch.isfinite(output).all()

    def refused(what: str, job) -> None:
        before = pool.status()
        try:
            job()
        except OutOfMemoryError as error:
            after = pool.status()
            same = before is not None and after is not None and before.pids == after.pids
            print(f"{what}: {error} [pool {'lives' if same else 'was replaced'}]", flush=True)
        else:
            raise AssertionError(f"{what}: fitted")

    hog = occupy(left=10)
    refused("load bf16 with 10 GiB free", lambda: pool.load(model))
    del hog
    hog = occupy(left=30)
    refused("load float32 with 30 GiB free", lambda: pool.load(replace(model, dtype="float32")))
    forward(1024)
    print("bf16 with 30 GiB free: a 1024 x 1024 forward works", flush=True)
    refused("a step at 8192 x 8192", lambda: forward(8192))
    started = time.perf_counter()
    forward(1024)
    print(f"the next job succeeded {time.perf_counter() - started:.1f} s later, load included", flush=True)
    del hog
    close_pools()


if __name__ == "__main__":
    main()
