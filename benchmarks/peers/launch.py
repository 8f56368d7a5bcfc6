"""Runs one case in fresh processes, and takes them down again whatever happens."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from .case import PEERS, Case

ROOT = Path(__file__).resolve().parents[2]
LOG_LINES = 30
"""How much of a failed rank's log is shown."""


def run_case(case: Case) -> tuple[dict[str, Any], torch.Tensor | None]:
    """The row of a case, and the latent; no latent where the row has a `reason` why there is no number."""
    row = {"peer": case.peer, "ranks": case.ranks, "size": case.size}
    if case.peer not in PEERS:
        return {**row, "reason": f"unknown; the peers are {', '.join(PEERS)}"}, None
    if not case.tiny and torch.cuda.device_count() < case.ranks:
        return {**row, "reason": f"this machine has {torch.cuda.device_count()} GPUs"}, None
    with tempfile.TemporaryDirectory(prefix="compare-") as name:
        folder = Path(name)
        (folder / "case.json").write_text(json.dumps(asdict(case)))
        processes = [_start(case, rank, folder) for rank in range(case.ranks)]
        try:
            reason = _wait(processes, folder, case.limit)
        finally:
            _end(processes)
        if reason:
            return {**row, "reason": reason}, None
        measured = json.loads((folder / "row.json").read_text())
        return {**row, **measured}, load_file(folder / "latent.safetensors")["latent"]


def _start(case: Case, rank: int, folder: Path) -> subprocess.Popen[bytes]:
    # What torchrun sets, but for the rendezvous: ranks meet in the folder. And unlike torchrun's, these processes are
    # ours to end, each with all of its children.
    place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": case.ranks, "LOCAL_WORLD_SIZE": case.ranks}
    environment = {**os.environ, **{key: str(value) for key, value in place.items()}, "OMP_NUM_THREADS": "1"}
    if case.tiny:
        environment["GLOO_SOCKET_IFNAME"] = "lo"
    with open(folder / f"{rank}.log", "wb") as log:
        return subprocess.Popen(
            [sys.executable, "-m", f"benchmarks.peers.{PEERS[case.peer].module}", str(folder)],
            cwd=ROOT,
            env=environment,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )


def _wait(processes: list[subprocess.Popen[bytes]], folder: Path, limit: float) -> str:
    """Wait for all ranks, or the first that fails, as the others may wait for that one; return why, "" if none."""
    deadline = time.monotonic() + limit
    while time.monotonic() < deadline:
        codes = [process.poll() for process in processes]
        failed = next((rank for rank, code in enumerate(codes) if code), None)
        if failed is not None:
            return _reason(failed, codes[failed], folder)
        if None not in codes:
            return ""
        time.sleep(0.05)
    _show_log(next(rank for rank, process in enumerate(processes) if process.poll() is None), folder)
    return f"took longer than {limit:.3g} s"


def _reason(rank: int, code: int | None, folder: Path) -> str:
    _show_log(rank, folder)
    # The first to fail wrote down why; a rank that only lost its neighbour may be seen before it.
    told = sorted(folder.glob("reason-*.txt"), key=lambda file: file.stat().st_mtime)
    text = told[0].read_text() if told else f"rank {rank} ended with {code}"
    return " ".join(text.split())[:300]


def _show_log(rank: int, folder: Path) -> None:
    lines = (folder / f"{rank}.log").read_text(errors="replace").splitlines()[-LOG_LINES:]
    print(f"--- log of rank {rank}", *lines, "---", sep="\n", file=sys.stderr, flush=True)


def _end(processes: list[subprocess.Popen[bytes]]) -> None:
    """End each rank's process group: compile workers outlive their parent."""
    for process in processes:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    for process in processes:
        process.wait()
