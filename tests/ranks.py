"""Runs a function on P ranks (processes, gloo, CPU) and brings the results back, for tests and benchmarks.

A launch costs half a second per rank, so let one launch check many cases. Results travel as safetensors and JSON files.
"""

from __future__ import annotations

import importlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from datetime import timedelta
from functools import cache
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent


def run_ranks(
    world_size: int,
    target: str,
    args: dict[str, Any] | None = None,
    timeout: float = 800,
    forked: bool = True,
    own_options: bool = False,
) -> list[dict[str, Any]]:
    """Run `function(rank, world_size, **args)` on every rank of an initialised gloo group.

    Args:
        world_size: processes to start, each a fork of one that has imported torch and diffusers and done nothing
            else, or not (`forked`); where `args` name a `comfyui`, one that has imported that as well.
        target: "module:function", importable from the repository root.
        args: keyword arguments, JSON data.
        timeout: seconds for everything; then all ranks are ended and the test fails.
        forked: False: each is a process that starts from nothing, as ranks on a GPU must be. To import diffusers asks
            CUDA for its devices, and CUDA does not outlive a fork.
        own_options: the function imports ComfyUI itself, with other options than that of the CPU.

    Returns:
        What each rank's function returned, by rank: a dict whose values are tensors or JSON data.
    """
    with tempfile.TemporaryDirectory(prefix="ranks-") as name:
        folder = Path(name)
        (folder / "args.json").write_text(json.dumps(args or {}))
        launcher = _launcher("" if own_options or not forked else (args or {}).get("comfyui", ""))
        assert launcher.stdin is not None
        launcher.stdin.write(f"{json.dumps([name, target, world_size, forked])}\n")
        launcher.stdin.flush()
        try:
            _wait(launcher, folder, world_size, time.monotonic() + timeout)
        except BaseException:
            os.killpg(launcher.pid, signal.SIGKILL)  # with its ranks, which may wait for each other
            launcher.wait()
            _launcher.cache_clear()
            raise
        return [_read(folder, rank) for rank in range(world_size)]


@cache
def _launcher(comfyui: str) -> subprocess.Popen[str]:
    """The process that has imported what ranks need, of a ComfyUI too, and forks them: imports cost seconds each."""
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    return subprocess.Popen(
        [sys.executable, __file__, comfyui],
        cwd=ROOT,
        env=environment,
        stdin=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def _wait(launcher: subprocess.Popen[str], folder: Path, world_size: int, deadline: float) -> None:
    """Return when all ranks are through; the first failure ends the wait, as the others may wait for that rank."""
    while True:
        codes = {rank: path.read_text() for rank in range(world_size) if (path := folder / f"{rank}.code").exists()}
        failed = [rank for rank, code in codes.items() if code != "0"]
        if failed or time.monotonic() > deadline or launcher.poll() is not None:
            named = failed or [rank for rank in range(world_size) if rank not in codes]
            logs = "\n".join(f"--- rank {rank}\n{_log(folder, rank)[-4000:]}" for rank in named)
            raise AssertionError(f"ranks {named} {'failed' if failed else 'ran out of time'}\n{logs}")
        if len(codes) == world_size:
            return
        time.sleep(0.02)


def _log(folder: Path, rank: int) -> str:
    path = folder / f"{rank}.log"
    return path.read_text(errors="replace") if path.exists() else "was not started"


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
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size, timeout=timedelta(seconds=600))
    module, function = target.split(":")
    args = json.loads((folder / "args.json").read_text())
    _write(folder, rank, getattr(importlib.import_module(module), function)(rank, world_size, **args))
    dist.barrier()  # a rank that leaves early breaks the others' connections
    dist.destroy_process_group()


def _launch(folder: Path, target: str, world_size: int, forked: bool) -> None:
    """Start the ranks, and note how each ended."""
    start = _fork if forked else _start
    ranks = {start(folder, target, rank, world_size): rank for rank in range(world_size)}
    while ranks:
        pid, status = os.wait()
        rank = ranks.pop(pid)
        (folder / "code").write_text(str(os.waitstatus_to_exitcode(status)))
        (folder / "code").rename(folder / f"{rank}.code")


def _fork(folder: Path, target: str, rank: int, world_size: int) -> int:
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        log = os.open(folder / f"{rank}.log", os.O_WRONLY | os.O_CREAT)
        os.dup2(log, 1)
        os.dup2(log, 2)
        _main(folder, target, rank, world_size)
        code = 0
    except BaseException:  # noqa: BLE001 - the end of a process: its log tells
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)  # nothing of the launcher's is for this process to end


def _start(folder: Path, target: str, rank: int, world_size: int) -> int:
    command = [sys.executable, __file__, str(folder), target, str(rank), str(world_size)]
    with (folder / f"{rank}.log").open("wb") as log:
        return subprocess.Popen(command, cwd=ROOT, stdin=subprocess.DEVNULL, stdout=log, stderr=log).pid


def _import_comfyui(folder: str) -> None:
    from parallel_runtime.networks.comfyui.comfy_code import use_comfyui

    importlib.import_module("tests")  # ComfyUI has a package of that name
    use_comfyui(folder, {"cpu": True})
    importlib.import_module("comfy.sd")


if __name__ == "__main__" and len(sys.argv) > 2:
    _main(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]), int(sys.argv[4]))
elif __name__ == "__main__":
    import diffusers
    import torch.distributed  # noqa: F401

    import parallel_runtime.loading.checkpoint  # noqa: F401 - as the others, for the ranks

    diffusers.FluxTransformer2DModel  # noqa: B018 - which is imported when it is looked up, and most models with it
    if sys.argv[1]:
        _import_comfyui(sys.argv[1])
    for line in sys.stdin:
        asked = json.loads(line)
        _launch(Path(asked[0]), *asked[1:])
