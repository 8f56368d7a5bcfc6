"""Runs one case in fresh processes, and takes them down again whatever happens."""

from __future__ import annotations

import contextlib
import json
import math
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from .case import RIVALS, Case
from .schedule import Outcome

ROOT = Path(__file__).resolve().parents[2]
LOG_LINES = 30
"""How much of a failed rank's log is shown."""
GRACE = 15.0
"""Seconds that the ranks get to leave after the result is written; some hang on the way out."""


class Run:
    """A case's processes, each the leader of a process group: they import, wait to be told to go, and measure.

    Args:
        gpus: of this machine, one for each rank.
        machine: how many GPUs it has; each compiles with its share of the cores.
    """

    def __init__(self, case: Case, gpus: tuple[int, ...], machine: int) -> None:
        self._case, self._gpus = case, gpus
        self._folder = Path(tempfile.mkdtemp(prefix="compare-"))
        self._deadline, self._finished = math.inf, math.inf
        self._processes: list[subprocess.Popen[bytes]] = []
        try:
            self._processes += [self._start(rank, machine) for rank in range(case.ranks)]
        except OSError:
            self.end()
            raise

    def go(self, limit: float) -> None:
        """Let them measure, for at most so many seconds."""
        self._case = replace(self._case, limit=limit)
        self._deadline = time.monotonic() + limit
        file = self._folder / "case.json"
        file.with_suffix(".part").write_text(json.dumps(asdict(self._case)))
        file.with_suffix(".part").rename(file)  # all at once: the processes wait for it

    def poll(self) -> Outcome | None:
        """The row and the latent, or a row with a `reason` why there is no number; None while it runs."""
        codes = [process.poll() for process in self._processes]
        now = time.monotonic()
        if (measured := self._read_row()) is not None:
            self._finished = min(self._finished, now)
            # What goes wrong from here on, as on the way out, changes nothing of what was measured.
            if None in codes and not any(codes) and now < min(self._finished + GRACE, self._deadline):
                return None
            return {**measured, **self._memory()}, load_file(self._folder / "latent.safetensors")["latent"]
        # The first that fails ends all, as the others may wait for it.
        failed = next((rank for rank, code in enumerate(codes) if code), None)
        if failed is not None:
            return {"reason": self._reason(failed, codes[failed])}, None
        if None not in codes:
            return {"reason": "all ranks ended, but rank 0 measured nothing"}, None
        if now < self._deadline:
            return None
        self._show_log(codes.index(None))
        return {"reason": f"took longer than {self._case.limit:.3g} s"}, None

    def end(self) -> None:
        """End each rank's process group, as compile workers outlive their parent, and remove the folder."""
        for process in self._processes:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)
        for process in self._processes:
            process.wait()
        self._processes = []
        shutil.rmtree(self._folder, ignore_errors=True)

    def _start(self, rank: int, machine: int) -> subprocess.Popen[bytes]:
        case = self._case
        with open(self._folder / f"{rank}.log", "wb") as log:
            return subprocess.Popen(
                [sys.executable, "-m", "benchmarks.rivals.process", str(self._folder), *imports(case)],
                cwd=ROOT,
                env={**os.environ, **environment(case, rank, self._gpus, machine)},
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def _read_row(self) -> dict[str, Any] | None:
        file = self._folder / "row.json"
        try:
            row: dict[str, Any] = json.loads(file.read_text())
        except (FileNotFoundError, json.JSONDecodeError):  # not there, or being written
            return None
        return row

    def _memory(self) -> dict[str, float]:
        """Of the fullest rank; see process.py. Nothing on a CPU."""
        ranks = [json.loads(file.read_text()) for file in self._folder.glob("memory-*.json")]
        return {name: max(rank[name] for rank in ranks) for name in (ranks[0] if ranks else ())}

    def _reason(self, rank: int, code: int | None) -> str:
        self._show_log(rank)
        # The first to fail wrote down why; a rank that only lost its neighbour may be seen before it.
        told = sorted(self._folder.glob("reason-*.txt"), key=lambda file: file.stat().st_mtime)
        text = told[0].read_text() if told else f"rank {rank} ended with {code}"
        return " ".join(text.split())[:300]

    def _show_log(self, rank: int) -> None:
        lines = (self._folder / f"{rank}.log").read_text(errors="replace").splitlines()[-LOG_LINES:]
        title = f"--- {self._case.rival} on {self._case.ranks} at {self._case.size}, log of rank {rank}"
        print(title, *lines, "---", sep="\n", file=sys.stderr, flush=True)


def imports(case: Case) -> list[str]:
    """What its processes import first: its rival, and what that will import. Not xfuser, which looks at a GPU
    then, nor torch._inductor, which may start its compilers."""
    names = [
        f"benchmarks.rivals.{RIVALS[case.rival].module}",
        "diffusers.models.transformers.transformer_flux",
    ]
    return names + ["torch._dynamo"] * bool(case.compile)


def environment(case: Case, rank: int, gpus: tuple[int, ...], machine: int) -> dict[str, str]:
    """What a rank's process gets beside our own: what torchrun sets, but for the rendezvous, which is in the folder."""
    variables = {
        "RANK": rank,
        "LOCAL_RANK": rank,
        "WORLD_SIZE": case.ranks,
        "LOCAL_WORLD_SIZE": case.ranks,
        "OMP_NUM_THREADS": 1,
        "GLOO_SOCKET_IFNAME": "lo",
    }
    if not case.tiny:
        seen = os.environ.get("CUDA_VISIBLE_DEVICES")
        names = seen.split(",") if seen else [str(gpu) for gpu in range(machine)]
        variables["CUDA_VISIBLE_DEVICES"] = ",".join(names[gpu] for gpu in gpus)
        # By default every rank would start 32 compilers.
        variables["TORCHINDUCTOR_COMPILE_THREADS"] = max(1, (os.cpu_count() or 1) // max(1, machine))
        if not case.p2p:
            variables["NCCL_P2P_DISABLE"] = 1
    return {name: str(value) for name, value in variables.items()}


def count_gpus() -> int:
    """Of this machine."""
    return torch.cuda.device_count()
