"""A rank whose engine does as the request says: works a little, or fails in a chosen way at a chosen place.

A fault is written into the request: in a Load's path or a Sample's sampler, as "FAULT RANK STEP", such as "exit 1 2";
STEP -1 is PREPARE, and RANK * is every rank. Any other text is a job that succeeds. Every step makes a collective call,
so that a rank that fails leaves the others waiting in it, as a real transformer would.
"""

from __future__ import annotations

import errno
import gc
import os
import signal
import time
from collections.abc import Mapping

if __name__ == "__main__":
    gc.disable()  # as in workers/rank/__main__.py

import torch
import torch.distributed as dist

from parallel_runtime.engine.engine import Engine
from parallel_runtime.engine.rank_state import Prepared
from parallel_runtime.errors import RequestError
from parallel_runtime.requests.control import Cancelled, Control
from parallel_runtime.requests.requests import Answer, Finished, Load, Loaded, Request, Sample, Step
from workers.rank import start

STEP_SECONDS = 0.02
FAULTS = ("raise", "kill", "hang")
"""By number from 1: -1 at place R of a call's x lets rank R raise, and so on."""


def fail(fault: str, control: Control) -> None:
    """Fail in that way, here and now."""
    if fault == "raise":
        raise RuntimeError("planted fault")
    if fault == "refuse":
        raise RequestError("A planted refusal.", "Do as it says.")
    if fault == "oom":
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB. GPU 0 has")
    if fault == "unmapped":
        raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))
    if fault == "exit":
        os._exit(3)
    if fault == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if fault == "segv":
        os.kill(os.getpid(), signal.SIGSEGV)
    if fault == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
    if fault == "hang":
        time.sleep(600)
    if fault == "pause":
        time.sleep(3)
    if fault == "compile":  # as in the compiler, which hears nothing
        heartbeat = control._rank.heartbeat  # type: ignore[attr-defined]
        heartbeat._compiling_since = time.monotonic()
        time.sleep(8)
        heartbeat._compiling_since = None
    if fault == "slow":  # as a large file that loads: cancel is heard between tensors
        for _ in range(200):
            time.sleep(0.05)
            control.check_cancel()


class FaultyEngine(Engine):
    """Knows no model; see the module."""

    def prepare(self, request: Request, meta: Mapping[str, torch.Tensor], control: Control) -> Prepared:
        """Fail here where the request says so."""
        if isinstance(request, Load):
            self._maybe(request.path, -1, control)
            answer: Answer = Loaded("none", 0, False, request.path)
            return Prepared(run_it=lambda tensors, control, agreed: (answer, {}))
        if isinstance(request, Sample):
            self._maybe(request.sampler, -1, control)
            return Prepared(run_it=lambda tensors, control, agreed: self._steps(request, tensors, control))
        return self.recall(Step(0))

    def recall(self, step: Step) -> Prepared:
        """Any call: its x comes back. Where x holds FAULTS' number for this rank, the call fails in that way."""

        def work(
            tensors: Mapping[str, torch.Tensor], control: Control, agreed: Mapping[str, int]
        ) -> tuple[Answer, dict[str, torch.Tensor]]:
            x = tensors.get("x", torch.zeros(1))
            for place, fault in enumerate(x.flatten()[:2].tolist()):
                if place == self.rank and fault < 0:
                    fail(FAULTS[int(-fault) - 1], control)
            if self.world_size > 1:
                dist.all_reduce(x.clone())
            return Finished(), {"output": x}

        return Prepared(run_it=work)

    def _steps(
        self, request: Sample, tensors: Mapping[str, torch.Tensor], control: Control
    ) -> tuple[Answer, dict[str, torch.Tensor]]:
        total = len(tensors["sigmas"]) - 1
        x = tensors["x"].clone()
        for step in range(total):
            self._maybe(request.sampler, step, control)
            time.sleep(STEP_SECONDS)
            if self.world_size > 1:
                dist.all_reduce(x)
                x /= self.world_size
            control.progress(step, total)
            if control.all_stop(dist.group.WORLD if self.world_size > 1 else None):
                raise Cancelled
        return Finished("steps"), {"latent": x}

    def _maybe(self, text: str, step: int, control: Control) -> None:
        words = text.split()
        if len(words) == 3 and words[1] in ("*", str(self.rank)) and int(words[2]) == step:
            if words[0] == "crawl":
                self._crawl()
            fail(words[0], control)

    def _crawl(self) -> None:
        """A forward whose blocks take a second each."""
        for _ in range(7):
            time.sleep(1)
            self.residency.pulse.mark()


if __name__ == "__main__":
    gc.freeze()
    gc.enable()
    start.main(FaultyEngine)
