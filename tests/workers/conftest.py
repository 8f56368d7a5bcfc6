"""Pools whose ranks fail on request, and the check that nothing of a pool is left."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass, field
from pathlib import Path

import psutil
import pytest
import torch

from parallel_runtime.config import ParallelConfig
from workers.client import Branch, ModelRequest, PoolClient, SampleRequest
from workers.launch import PoolSpec
from workers.pool import RunningPool


def alive(process: psutil.Process) -> bool:
    """Running, and no zombie."""
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


@dataclass
class FaultyPool:
    """A client of ranks that run `faulty_rank`, with shorthands for jobs that fail and jobs that succeed."""

    client: PoolClient
    processes: list[psutil.Process] = field(default_factory=list)
    directories: list[Path] = field(default_factory=list)

    @property
    def pool(self) -> RunningPool:
        """The running pool."""
        return self.client.start()

    def remember(self) -> None:
        """Note the processes and files of the pool that runs now."""
        pool = self.pool
        supervisor = psutil.Process(pool._supervisor.pid)
        self.processes += [supervisor, *supervisor.children(recursive=True)]
        self.directories.append(pool.directory)

    def model(self, path: str = "fine") -> ModelRequest:
        """A Load that does what `path` says."""
        return ModelRequest(path, "float32", ParallelConfig(devices=f"cpu:{self.client.spec.world_size}"))

    def sample(self, fault: str = "fine", steps: int = 5, **callbacks) -> torch.Tensor:
        """A Sample that does what `fault` says."""
        branch = Branch({"context": torch.zeros(1, 1, 1)}, 0)
        x = torch.arange(6.0).reshape(1, 6)
        request = SampleRequest(fault, torch.linspace(1, 0, steps + 1), x, (branch,), 1.0, 0)
        return self.client.sample(self.model(), request, **callbacks)

    def forward(self, faults: tuple[int, int] = (0, 0)) -> torch.Tensor:
        """One call of the transformer; `faults` as in `faulty_rank.FAULTS`, one number a rank."""
        x = torch.tensor([[*faults, 5.0, 6.0]]).float()
        return self.client.forward(self.model(), x, torch.tensor([0.5]), {"context": torch.zeros(1, 1, 1)})

    def check_works(self) -> None:
        """The next job succeeds."""
        assert torch.equal(self.sample(), torch.arange(6.0).reshape(1, 6))

    def check_gone(self, seconds: float = 3.0) -> None:
        """No process of the remembered pools lives and no file of theirs is left."""
        deadline = time.monotonic() + seconds
        while any(map(alive, self.processes)) and time.monotonic() < deadline:
            time.sleep(0.02)
        assert [process for process in self.processes if alive(process)] == []
        assert [directory for directory in self.directories if os.path.exists(directory)] == []


@pytest.fixture
def faulty_pool(monkeypatch, tmp_path):
    """Make pools of faulty ranks; all are closed, and must leave nothing, at the end of the test."""
    monkeypatch.setenv("PARALLEL_DIT_LOGS", str(tmp_path / "logs"))
    made: list[FaultyPool] = []

    def make(ranks: int = 2) -> FaultyPool:
        spec = PoolSpec("cpu", tuple(range(ranks)))
        faulty = FaultyPool(PoolClient(spec, "tests.workers.faulty_rank"))
        made.append(faulty)
        faulty.client.load(faulty.model())
        faulty.remember()
        return faulty

    yield make
    for faulty in made:
        if faulty.client._pool is not None and faulty.client._pool.alive:
            faulty.remember()
        faulty.client.close()
        faulty.check_gone()
