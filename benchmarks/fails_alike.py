"""An error that ComfyUI's network raises on all ranks alike, on real devices: the same pool computes the next call.

python -m benchmarks.fails_alike --devices 0,1 --comfyui FOLDER          (or cpu:2; writes a tiny FLUX.1; half a minute)
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path

import torch

from parallel_runtime.config import ParallelConfig
from parallel_runtime.errors import ParallelError
from parallel_runtime.requests.requests import ComfyuiCode, Scalar
from tests.tiny_flux import write_original
from workers.client.client import ModelRequest, PoolClient
from workers.client.pool_registry import close_pools, get_pool

_CALLS = 8
"""So many, that forwards are recorded on GPUs."""


def call(pool: PoolClient, model: ModelRequest, width: int, wrong: bool = False) -> torch.Tensor:
    """A call of the network with a text of this width."""
    drawn = torch.Generator().manual_seed(0)
    text = {
        "context": torch.randn(1, 9, width, generator=drawn),
        "y": torch.randn(1, 31 if wrong else 32, generator=drawn),
        "guidance": torch.tensor([3.0]),
    }
    return pool.forward(model, torch.randn(1, 16, 14, 20, generator=drawn), torch.tensor([0.5]), text)


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--devices", default="0,1")
    parser.add_argument("--comfyui", type=Path, default=Path.home() / "ComfyUI")
    arguments = parser.parse_args()
    config = ParallelConfig(devices=arguments.devices, compile="off")
    with tempfile.TemporaryDirectory() as folder:
        file = write_original(Path(folder, "tiny.safetensors"))
        options: dict[str, Scalar] = {"cpu": True} if arguments.devices.startswith("cpu") else {}
        code = ComfyuiCode(str(arguments.comfyui.resolve()), options, "float32")
        model = ModelRequest(str(file), "float32", config, comfyui=code)
        pool = get_pool(config)
        pool.load(model)
        before = [call(pool, model, 64) for _ in range(_CALLS)][-1]
        status = pool.status()
        processes = status.pids if status is not None else {}
        for what, width, wrong in (("a text of another width", 63, False), ("another pooled text", 64, True)):
            began = time.perf_counter()
            try:
                call(pool, model, width, wrong)
                print(f"{what}: no error")
            except ParallelError as error:
                print(f"{what}: {error}")
            middle = time.perf_counter()
            after = [call(pool, model, 64) for _ in range(_CALLS)][-1]
            status = pool.status()
            same = status is not None and status.pids == processes
            difference = float((after - before).abs().max() / before.abs().max())
            seconds = f"after {middle - began:.1f} s, next calls {time.perf_counter() - middle:.1f} s"
            print(f"  {seconds}; same processes: {same}; next calls off by {difference:.0e}")
        close_pools()


if __name__ == "__main__":
    main()
