"""Five hundred requests, with cancels and errors among them, leave everything as small as it was."""

from __future__ import annotations

import contextlib
import gc
import os
from dataclasses import dataclass

import psutil
import pytest
import torch

from parallel_runtime.config import ParallelConfig
from parallel_runtime.errors import CheckpointError, RequestError
from parallel_runtime.requests.control import Cancelled
from tests.tiny_flux import tiny_config, write_diffusers_folder
from tests.workers.loops import make_loop
from workers.client.client import PoolClient
from workers.client.node_requests import ModelRequest
from workers.launch import PoolSpec

REQUESTS = 500
SETTLED = 150


@dataclass
class Usage:
    """What a process holds. Memory is what it holds alone: mapped files and shared libraries do not count."""

    descriptors: int
    threads: int
    memory: int

    @classmethod
    def of(cls, pid: int) -> Usage:
        process = psutil.Process(pid)
        return cls(process.num_fds(), process.num_threads(), process.memory_full_info().uss)


def request(number: int, model: ModelRequest, client: PoolClient) -> None:
    """The kinds of requests in turn."""
    generator = torch.Generator().manual_seed(number)
    text = {"context": torch.randn(1, 3 + number % 5, 64, generator=generator), "y": torch.zeros(1, 32)}
    x = torch.randn(1, 16, 4 + number % 4, 6, generator=generator)
    sample = make_loop("euler", torch.linspace(1, 0, 3), x, {0: text}, 1.0, preview=True)
    kind = number % 10
    if kind == 3:
        with pytest.raises(RequestError):
            client.forward(model, x, torch.tensor([0.5]), {**text, "y": torch.zeros(1, 32), "unknown": x})
    elif kind == 5:
        with pytest.raises(CheckpointError):
            client.load(ModelRequest("/nowhere", "float32", model.config))
        client.load(model)
    elif kind == 7:
        with contextlib.suppress(Cancelled):
            client.sample(model, sample, should_cancel=lambda: True)
    elif kind in (1, 8):
        assert client.sample(model, sample).shape == x.shape
    else:
        assert client.forward(model, x, torch.tensor([0.5]), text).shape == x.shape


@pytest.mark.long
def test_the_pool_does_not_grow(tmp_path, monkeypatch):
    monkeypatch.setenv("PARALLEL_DIT_LOGS", str(tmp_path))
    path = write_diffusers_folder(tmp_path / "tiny", tiny_config(num_layers=1, num_single_layers=1))
    client = PoolClient(PoolSpec("cpu", (0, 1)))
    model = ModelRequest(str(path), "float32", ParallelConfig(devices="cpu:2"))
    try:
        client.load(model)
        status = client.status()
        assert status is not None
        pids = [os.getpid(), client.start().pid, *status.pids.values()]
        before: list[Usage] = []
        for number in range(REQUESTS):
            request(number, model, client)
            if number == SETTLED:
                gc.collect()
                before, shared = [Usage.of(pid) for pid in pids], set(os.listdir("/dev/shm"))
        gc.collect()
        after = [Usage.of(pid) for pid in pids]
        assert client.status().pids == status.pids  # type: ignore[union-attr]
        for old, new in zip(before, after, strict=True):
            assert new.descriptors <= old.descriptors + 1
            assert new.threads <= old.threads
            assert new.memory - old.memory < 24 << 20
        assert set(os.listdir("/dev/shm")) - shared == set()
    finally:
        client.close()
