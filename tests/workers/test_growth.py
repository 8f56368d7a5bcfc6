"""A running pool takes in more ranks: what is there stays, and what goes wrong costs what it must."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace

import psutil
import pytest
import torch

from parallel_runtime.config import ParallelConfig
from parallel_runtime.errors import PoolError
from parallel_runtime.requests.requests import Grow
from tests.tiny_flux import tiny_config, write_original
from workers.client.client import Branch, Cancelled, LoopRequest, ModelRequest, PoolClient
from workers.client.pool_registry import _PoolRegistry
from workers.client.submission import Submission
from workers.launch import PoolSpec, settings_of_ranks

from .conftest import FaultyPool, alive


def draw(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


X = draw(1, 16, 8, 6)
GIVEN = {"context": draw(1, 7, 64, seed=1), "y": draw(1, 32, seed=2), "guidance": torch.full((1,), 3.5)}


@pytest.fixture
def pools(monkeypatch, tmp_path) -> Iterator[_PoolRegistry]:
    monkeypatch.setenv("PARALLEL_DIT_LOGS", str(tmp_path / "logs"))
    pools = _PoolRegistry()
    yield pools
    pools.close()


def cpu(*devices: int) -> PoolSpec:
    return PoolSpec("cpu", devices)


@pytest.mark.slow  # threads grow in the first tier: test_ranks_stay_together.py
def test_one_rank_becomes_two_and_three_and_the_weights_of_the_first_are_not_read_again(pools, tmp_path):
    path = write_original(tmp_path / "tiny.safetensors", tiny_config(num_layers=1, num_single_layers=1))

    def use(ranks: int) -> tuple[PoolClient, bool, torch.Tensor]:
        """A loop, and two calls of which the second is a step that was prepared."""
        client = pools.get(cpu(*range(ranks)))
        model = ModelRequest(str(path), "float32", ParallelConfig(devices=f"cpu:{ranks}"))
        reused = client.load(model).reused
        request = LoopRequest("euler", torch.tensor([0.9, 0.4, 0.0]), X, (Branch(GIVEN, 0),), 1.0, 0)
        latent = client.sample(model, request)
        for _ in range(2):
            call = client.forward(model, X, torch.tensor([0.7]), GIVEN)
        return client, reused, torch.cat([latent, call])

    client, reused, alone = use(1)
    assert not reused
    first = client.status().pids[0]
    for ranks in (2, 3):
        grown, reused, together = use(ranks)
        assert grown is client
        assert reused  # by rank 0: the weights that it read at first
        assert list(client.status().pids) == list(range(ranks))
        assert client.status().pids[0] == first
        assert (together - alone).abs().max() < 1e-5 * alone.abs().max()
        again, reused, latent = use(1)
        assert again is client
        assert reused
        assert (latent - alone).abs().max() < 1e-5 * alone.abs().max()


@pytest.mark.slow
def test_pools_of_other_devices_compute_side_by_side_and_one_takes_the_others_device_over(pools, tmp_path):
    path = write_original(tmp_path / "tiny.safetensors", tiny_config(num_layers=1, num_single_layers=1))
    model = ModelRequest(str(path), "float32", ParallelConfig(devices="cpu:1"))
    clients = [pools.get(cpu(0)), pools.get(cpu(1))]
    outputs: dict[int, torch.Tensor] = {}

    def call(index: int) -> None:
        outputs[index] = clients[index].forward(model, X, torch.tensor([0.7]), GIVEN)

    threads = [threading.Thread(target=call, args=(index,)) for index in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert torch.equal(outputs[0], outputs[1])
    pids = [client.status().pids[0] for client in clients]
    assert pids[0] != pids[1]
    both = pools.get(cpu(0, 1))
    assert both is clients[0]
    assert not psutil.pid_exists(pids[1])
    two = replace(model, config=ParallelConfig(devices="cpu:2"))
    output = both.forward(two, X, torch.tensor([0.7]), GIVEN)
    assert (output - outputs[0]).abs().max() < 1e-5 * outputs[0].abs().max()
    assert both.status().pids[0] == pids[0]


@pytest.mark.parametrize(
    ("running", "wanted", "grows"),
    [
        (cpu(0), cpu(0, 1), True),
        (cpu(0, 1), cpu(0, 1, 2, 3), True),
        (cpu(0, 1), cpu(1, 2), False),  # some in common
        (cpu(1), cpu(0, 1), False),  # the order says which rank a GPU is
        (cpu(0), cpu(0), False),
        (cpu(0, 1), cpu(0), False),
        (cpu(0), PoolSpec("cpu", (0, 1), hosts=2), False),
        (PoolSpec("cpu", (0,), hosts=2), PoolSpec("cpu", (0, 1), hosts=2), False),
        (PoolSpec("cuda", (0,)), cpu(0, 1), False),
    ],
)
def test_a_pool_grows_behind_its_own_ranks_only(running, wanted, grows):
    assert running.grows_to(wanted) == grows


def test_a_pool_that_began_in_another_environment_is_replaced(monkeypatch):
    client = PoolClient(cpu(0))
    running = SimpleNamespace(alive=True, settings=settings_of_ranks(os.environ))
    monkeypatch.setattr(client._keeper, "pool", running)
    assert client.grows_to(cpu(0, 1))
    monkeypatch.setenv("NCCL_P2P_DISABLE", "1")
    assert not client.grows_to(cpu(0, 1))


def grow(pool: FaultyPool, ranks: int = 2, **callbacks) -> None:
    pool.client.spec = cpu(*range(ranks))  # as `_PoolRegistry` does
    pool.client.load(pool.model(), **callbacks)


def count_ranks(pool: FaultyPool) -> int:
    return len(pool.client.status().devices)


@pytest.mark.slow
def test_a_fault_after_growth_costs_the_pool_and_the_next_one_has_all_ranks(faulty_pool):
    pool = faulty_pool(1)
    first = pool.client.status().pids[0]
    grow(pool)
    pool.remember()
    pool.check_works()
    assert pool.client.status().pids[0] == first
    with pytest.raises(PoolError, match=r"Rank 1 \(process \d+\) ended in the middle of a job"):
        pool.sample("kill 1 1")
    pool.check_works()
    assert count_ranks(pool) == 2
    assert pool.client.status().pids[0] != first


@pytest.mark.slow
def test_growth_waits_for_the_job_that_runs(faulty_pool):
    pool = faulty_pool(1)
    steps: list[float] = []
    running = pool.pool

    def sample() -> None:
        pool.sample(steps=300, on_progress=lambda *_: steps.append(time.monotonic()))

    worker = threading.Thread(target=sample)
    worker.start()
    while not steps:
        time.sleep(0.01)
    # Past the client's own lock, under which its requests wait for each other.
    running.submit(Submission(request=Grow((0, 1))))
    grown = time.monotonic()
    worker.join()
    assert len(steps) == 300
    # The thread may come to the last ones a moment later; had growth not waited, a hundred and more were to come.
    assert sum(at > grown for at in steps) < 20
    assert len(running.status().devices) == 2


@pytest.mark.slow
@pytest.mark.parametrize("fault", ["exits", "killed"])
def test_a_newcomer_that_fails_is_told_of_and_the_pool_lives_on_without_it(faulty_pool, monkeypatch, fault):
    monkeypatch.setenv("TEST_NEWCOMERS", fault)
    pool = faulty_pool(1)
    first = pool.client.status().pids[0]
    supervisor = psutil.Process(pool.pool.pid)
    before = {process.pid for process in supervisor.children(recursive=True)}
    for _ in range(2 if fault == "exits" else 1):
        with pytest.raises(PoolError, match="before it could join the running pool. Free what it needs"):
            grow(pool)
        assert {process.pid for process in supervisor.children(recursive=True) if alive(process)} == before
        assert pool.client.spec == cpu(0)
        pool.check_works()
    assert pool.client.status().pids == {0: first}


@pytest.mark.slow
def test_a_cancel_while_newcomers_start_returns_at_once_and_the_next_request_finds_them(faulty_pool):
    pool = faulty_pool(1)
    first, began = pool.client.status().pids[0], time.monotonic()
    with pytest.raises(Cancelled):
        grow(pool, should_cancel=lambda: time.monotonic() - began > 0.5)
    pool.client.load(replace(pool.model(), config=ParallelConfig(devices="cpu:1")))  # needs none of them
    assert count_ranks(pool) == 1
    grow(pool)
    pool.check_works()
    assert count_ranks(pool) == 2
    assert pool.client.status().pids[0] == first
