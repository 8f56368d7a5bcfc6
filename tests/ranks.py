"""Runs a function on P ranks (processes, gloo, CPU) and brings the results back, for tests and benchmarks.

A launch costs seconds per rank, so let one launch check many cases. Results travel as safetensors and JSON files.
"""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
import tempfile
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent


def run_ranks(
    world_size: int, target: str, args: dict[str, Any] | None = None, timeout: float = 150
) -> list[dict[str, Any]]:
    """Run `function(rank, world_size, **args)` on every rank of an initialised gloo group.

    Args:
        world_size: processes to start, each a fresh interpreter.
        target: "module:function", importable from the repository root.
        args: keyword arguments, JSON data.
        timeout: seconds for everything; then all ranks are ended and the test fails.

    Returns:
        What each rank's function returned, by rank: a dict whose values are tensors or JSON data.
    """
    with tempfile.TemporaryDirectory(prefix="ranks-") as name:
        folder = Path(name)
        (folder / "args.json").write_text(json.dumps(args or {}))
        processes = []
        try:
            for rank in range(world_size):
                processes.append(_start(folder, target, rank, world_size))
            _wait(processes, folder, time.monotonic() + timeout)
        finally:
            for process in processes:
                process.kill()
                process.wait()
        return [_read(folder, rank) for rank in range(world_size)]


def _start(folder: Path, target: str, rank: int, world_size: int) -> subprocess.Popen[bytes]:
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    with open(folder / f"{rank}.log", "wb") as log:
        return subprocess.Popen(
            [sys.executable, __file__, str(folder), target, str(rank), str(world_size)],
            cwd=ROOT,
            env=environment,
            stdout=log,
            stderr=subprocess.STDOUT,
        )


def _wait(processes: list[subprocess.Popen[bytes]], folder: Path, deadline: float) -> None:
    """Return when all ranks are through; the first failure ends the wait, as the others may wait for that rank."""
    while True:
        codes = [process.poll() for process in processes]
        failed = [rank for rank, code in enumerate(codes) if code]
        if failed or time.monotonic() > deadline:
            named = failed or [rank for rank, code in enumerate(codes) if code is None]
            logs = "\n".join(f"--- rank {rank}\n{(folder / f'{rank}.log').read_text()[-4000:]}" for rank in named)
            raise AssertionError(f"ranks {named} {'failed' if failed else 'ran out of time'}\n{logs}")
        if None not in codes:
            return
        time.sleep(0.05)


def _read(folder: Path, rank: int) -> dict[str, Any]:
    from safetensors.torch import load_file

    return {**json.loads((folder / f"{rank}.json").read_text()), **load_file(folder / f"{rank}.safetensors")}


def _write(folder: Path, rank: int, result: dict[str, Any]) -> None:
    import torch
    from safetensors.torch import save_file

    tensors = {name: value.contiguous().clone() for name, value in result.items() if isinstance(value, torch.Tensor)}
    save_file(tensors, folder / f"{rank}.safetensors")
    plain = {name: value for name, value in result.items() if name not in tensors}
    (folder / f"{rank}.json").write_text(json.dumps(plain))


def _main(folder: Path, target: str, rank: int, world_size: int) -> None:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    store = dist.FileStore(str(folder / "store"), world_size)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size, timeout=timedelta(seconds=100))
    module, function = target.split(":")
    args = json.loads((folder / "args.json").read_text())
    _write(folder, rank, getattr(importlib.import_module(module), function)(rank, world_size, **args))
    dist.barrier()  # a rank that leaves early breaks the others' connections
    dist.destroy_process_group()


if __name__ == "__main__":
    _main(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]), int(sys.argv[4]))
