"""A pool belongs to its devices: others live beside it, or take its place, whatever has become of it."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
import torch

from parallel_runtime.config import ParallelConfig
from tests.tiny_flux import tiny_config, write_diffusers_folder
from workers.client.client import PoolClient
from workers.client.node_requests import ModelRequest
from workers.client.pool_registry import PoolRegistry
from workers.launch import PoolSpec


def draw(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


X = draw(1, 16, 8, 6)
GIVEN = {"context": draw(1, 7, 64, seed=1), "y": draw(1, 32, seed=2), "guidance": torch.full((1,), 3.5)}


@pytest.fixture
def pools(monkeypatch, tmp_path) -> Iterator[PoolRegistry]:
    monkeypatch.setenv("PARALLEL_DIT_LOGS", str(tmp_path / "logs"))
    pools = PoolRegistry()
    yield pools
    pools.end()


@pytest.fixture(scope="module")
def path(tmp_path_factory) -> Path:
    config = tiny_config(num_layers=1, num_single_layers=1)
    return write_diffusers_folder(tmp_path_factory.mktemp("model") / "tiny", config)


def cpu(*devices: int) -> PoolSpec:
    return PoolSpec("cpu", devices)


def call(client: PoolClient, path: Path) -> torch.Tensor:
    config = ParallelConfig(devices=f"cpu:{client.spec.world_size}")
    return client.forward(ModelRequest(str(path), "float32", config), X, torch.tensor([0.7]), GIVEN)


@pytest.mark.slow
def test_pools_of_other_devices_compute_side_by_side_and_one_takes_the_others_place(pools, path):
    clients = [pools.get(cpu(0)), pools.get(cpu(1))]
    outputs: dict[int, torch.Tensor] = {}

    def work(index: int) -> None:
        outputs[index] = call(clients[index], path)

    threads = [threading.Thread(target=work, args=(index,)) for index in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert torch.equal(outputs[0], outputs[1])
    pids = [client.status().pids[0] for client in clients]
    both = pools.get(cpu(0, 1))
    assert not any(map(psutil.pid_exists, pids))
    assert (call(both, path) - outputs[0]).abs().max() < 1e-5 * outputs[0].abs().max()
    running = both.status().pids
    one = ModelRequest(str(path), "float32", ParallelConfig(devices="cpu:1"))
    assert pools.get(cpu(0)) is both
    both.forward(one, X, torch.tensor([0.7]), GIVEN)  # by a part of it: nothing starts
    assert both.status().pids == running


@pytest.mark.long_but_for("1-0.02")
@pytest.mark.slow
@pytest.mark.parametrize(("rank", "pause"), [(0, 0.0), (1, 0.02)])
def test_a_pool_whose_rank_died_idle_costs_the_next_prompt_on_other_devices_a_start_and_nothing_else(
    pools, path, rank, pause
):
    before = pools.get(cpu(0, 1))
    wanted = call(before, path)
    os.kill(before.status().pids[rank], signal.SIGKILL)
    time.sleep(pause)
    after = pools.get(cpu(0, 1, 2))
    assert (call(after, path) - wanted).abs().max() < 1e-5 * wanted.abs().max()
    assert sorted(after.status().pids) == [0, 1, 2]
