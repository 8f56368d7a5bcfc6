"""Pools whose ranks fail on request, and the check that nothing of a pool is left."""

from __future__ import annotations

import os
import tempfile
from dataclasses import dataclass, field
from pathlib import Path

import psutil
import pytest
import torch

from parallel_runtime.config import ParallelConfig
from tests.patience import SOON, wait_until
from tests.workers.loops import make_loop
from workers.client.client import PoolClient
from workers.client.node_requests import ModelRequest
from workers.client.running_pool import RunningPool
from workers.launch import PoolSpec


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
        supervisor = psutil.Process(pool.pid)
        self.processes += [supervisor, *supervisor.children(recursive=True)]
        self.directories.append(pool.directory)

    def model(self, path: str = "fine") -> ModelRequest:
        """A Load that does what `path` says."""
        return ModelRequest(path, "float32", ParallelConfig(devices=f"cpu:{self.client.spec.world_size}"))

    def sample(self, fault: str = "fine", steps: int = 5, **callbacks) -> torch.Tensor:
        """A Sample that does what `fault` says."""
        branches = {0: {"context": torch.zeros(1, 1, 1)}}
        x = torch.arange(6.0).reshape(1, 6)
        request = make_loop(fault, torch.linspace(1, 0, steps + 1), x, branches, 1.0)
        return self.client.sample(self.model(), request, **callbacks)

    def forward(self, faults: tuple[int, int] = (0, 0)) -> torch.Tensor:
        """One call of the transformer; `faults` as in `faulty_rank.FAULTS`, one number a rank."""
        x = torch.tensor([[*faults, 5.0, 6.0]]).float()
        return self.client.forward(self.model(), x, torch.tensor([0.5]), {"context": torch.zeros(1, 1, 1)})

    def check_works(self) -> None:
        """The next job succeeds."""
        assert torch.equal(self.sample(), torch.arange(6.0).reshape(1, 6))

    def is_as_new(self) -> bool:
        """It runs, and has nothing to do."""
        pool, status = self.client.pool, self.client.status()
        return pool is not None and pool.life.state != "cancelled" and status is not None and status.state == "idle"

    def forget_the_running(self) -> None:
        """Leave the running pool out of what must be gone."""
        supervisor = psutil.Process(self.pool.pid)
        running = {supervisor, *supervisor.children(recursive=True)}
        self.processes = [process for process in self.processes if process not in running]
        self.directories = [directory for directory in self.directories if directory != self.pool.directory]

    def close(self) -> None:
        """End the pool; nothing may be left."""
        if self.client.pool is not None and self.client.pool.life.alive:
            self.remember()
        self.client.close()
        self.check_gone()

    def check_gone(self) -> None:
        """No process of the remembered pools lives on and no file of theirs is left."""
        wait_until(lambda: not any(map(alive, self.processes)), SOON)
        assert [process for process in self.processes if alive(process)] == []
        wait_until(lambda: not any(map(os.path.exists, self.directories)), SOON)
        assert [directory for directory in self.directories if os.path.exists(directory)] == []


@dataclass
class Shelf:
    """Pools that work, and wait for the next test: a start takes seconds. The newest two."""

    pools: list[tuple[object, FaultyPool]] = field(default_factory=list)

    def take(self, kind: object) -> FaultyPool | None:
        """One that was started alike."""
        for place, (own, pool) in enumerate(self.pools):
            if own == kind:
                del self.pools[place]
                return FaultyPool(pool.client)
        return None

    def put(self, kind: object, pool: FaultyPool) -> None:
        """Keep it; an older one makes room."""
        self.pools.append((kind, pool))
        while len(self.pools) > 2:
            self.pools.pop(0)[1].close()

    def clear(self) -> None:
        """Close all."""
        while self.pools:
            self.pools.pop()[1].close()


@pytest.fixture(scope="session")
def shelf(tmp_path_factory):
    """Pools between tests, which write their logs beside each other."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PARALLEL_DIT_LOGS", str(tmp_path_factory.mktemp("logs")))
        shelf = Shelf()
        yield shelf
        shelf.clear()


def _kind(ranks: int) -> tuple[object, ...]:
    """What a pool that is started now would have from its surroundings."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTEST_CURRENT_TEST"}
    return ranks, tempfile.tempdir, tuple(sorted(environment.items()))


@pytest.fixture
def faulty_pool(shelf, monkeypatch):
    """Make pools of faulty ranks, or take over those of tests before, warm; what a test breaks leaves nothing."""
    made: list[tuple[tuple[object, ...], FaultyPool]] = []

    def make(ranks: int = 2) -> FaultyPool:
        kind = _kind(ranks)
        spec = PoolSpec("cpu", tuple(range(ranks)))
        faulty = shelf.take(kind) or FaultyPool(PoolClient(spec, "tests.workers.faulty_rank"))
        made.append((kind, faulty))
        faulty.client.load(faulty.model())
        faulty.remember()
        return faulty

    yield make
    for kind, faulty in made:
        if kind == _kind(faulty.client.spec.world_size) and faulty.is_as_new():
            faulty.forget_the_running()
            faulty.check_gone()
            shelf.put(kind, FaultyPool(faulty.client))
        else:
            faulty.close()
