"""Several models in one pool: they stay side by side, a switch costs no load, and the client knows what is held."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from dataclasses import replace

import pytest
import torch

from parallel_runtime.config import ParallelConfig
from parallel_runtime.engine.residency import MOST
from parallel_runtime.errors import PoolError
from parallel_runtime.requests.control import Cancelled
from parallel_runtime.requests.requests import Load
from tests.patience import wait_until
from tests.tiny_flux import tiny_config, write_diffusers_folder
from workers.client.client import PoolClient
from workers.client.node_requests import ModelRequest
from workers.client.pool_registry import PoolRegistry
from workers.launch import PoolSpec

CONFIG = tiny_config(num_layers=1, num_single_layers=1)
TWO = ParallelConfig(devices="cpu:2")


def draw(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


GIVEN = {"context": draw(1, 7, 64, seed=1), "y": draw(1, 32, seed=2), "guidance": torch.full((1,), 3.5)}


def forward(client: PoolClient, model: ModelRequest) -> torch.Tensor:
    return client.forward(model, draw(1, 16, 8, 6), torch.tensor([0.7]), GIVEN)


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> list[ModelRequest]:
    folder = tmp_path_factory.mktemp("models")
    paths = [write_diffusers_folder(folder / f"{seed}", CONFIG, seed=seed) for seed in (1, 2)]
    return [ModelRequest(str(path), "float32", TWO) for path in paths]


@pytest.fixture(scope="module")
def client():
    client = PoolClient(PoolSpec("cpu", (0, 1)))
    yield client
    client.close()


@pytest.fixture
def loads(client, monkeypatch) -> list[str]:
    """Paths of the loads that are asked for from now on."""
    seen: list[str] = []
    submit = client.start().submit

    def listen(submission):
        if isinstance(submission.request, Load):
            seen.append(submission.request.path)
        return submit(submission)

    monkeypatch.setattr(client.pool, "submit", listen)
    return seen


@pytest.mark.slow
def test_models_in_turn_give_what_each_gave_alone_and_are_loaded_once(client, models, loads):
    alone = []
    for model in models:
        alone.append(forward(client, model))
        client.release(model)
    loads.clear()
    for _ in range(3):
        for model, expected in zip(models, alone, strict=True):
            assert torch.equal(forward(client, model), expected)
    assert loads == [model.path for model in models]
    assert not torch.equal(*alone)


def test_unlike_configurations_in_turn_are_loaded_once_each(client, models, loads):
    one = replace(models[0], config=ParallelConfig(devices="cpu:1"))
    expected = forward(client, models[0])
    for _ in range(2):
        for model in (one, models[0]):
            assert (forward(client, model) - expected).abs().max() < 1e-5 * expected.abs().max()
    assert loads.count(models[0].path) <= 2


def test_the_client_knows_what_is_held_now(client, models):
    size = client.load(models[0]).bytes_per_rank
    client.load(models[1])
    assert [client.held_bytes(model) for model in models] == [size, size]
    assert client.release(models[0]) == size
    assert [client.held_bytes(model) for model in models] == [0, size]
    assert client.release(models[0]) == 0
    forward(client, models[0])
    assert [client.held_bytes(model) for model in models] == [size, size]


def test_a_model_that_the_ranks_have_forgotten_is_loaded_again_by_itself(client, models, loads):
    expected = forward(client, models[0])
    for patches in range(2, MOST + 2):
        client.load(replace(models[1], config=replace(TWO, patches=patches)))
    loads.clear()
    assert torch.equal(forward(client, models[0]), expected)
    assert loads == [models[0].path]


@pytest.mark.slow
def test_nothing_is_held_when_the_pool_is_dead(models):
    client = PoolClient(PoolSpec("cpu", (0,)))
    model = replace(models[0], config=ParallelConfig(devices="cpu:1"))
    try:
        assert client.held_bytes(model) == 0
        expected = forward(client, model)
        assert client.held_bytes(model) > 0
        os.kill(client.status().pids[0], signal.SIGKILL)
        wait_until(lambda: not client.held_bytes(model))
        assert client.held_bytes(model) == client.release(model) == 0
        try:
            again = forward(client, model)
        except PoolError:  # the death was not known yet
            again = forward(client, model)
        assert torch.equal(again, expected)
    finally:
        client.close()


@pytest.mark.slow
def test_pools_of_other_devices_live_side_by_side(models):
    pools = PoolRegistry()
    try:
        first, second = (pools.get(PoolSpec("cuda", devices)) for devices in ((0, 1), (2, 3)))
        assert pools.get(PoolSpec("cuda", (0,))) is first  # a part of it
        assert pools.get(PoolSpec("cuda", (2, 3))) is second
        both = pools.get(PoolSpec("cuda", (0, 1, 2)))
        assert pools.get(PoolSpec("cuda", (0, 1))) is both
        assert pools.get(PoolSpec("cuda", (2, 3))) not in (both, second)
    finally:
        pools.end()


def test_a_parked_model_is_known_and_comes_back_without_a_load(client, models, loads):
    alone = forward(client, models[0])
    loads.clear()
    assert client.release(models[0], park=True) > 0
    (parked,) = [loaded for model, loaded in client.models if model == models[0]]
    assert client.held_bytes(models[0]) == 0
    assert parked.details.model == "FLUX.1"
    assert torch.equal(forward(client, models[0]), alone)
    assert loads == []
    assert [model for model, _ in client.models if model == models[0]] == [models[0]]
    assert client.held_bytes(models[0]) > 0
    assert client.keeper.idle_seconds < 60


def test_who_waits_for_another_request_knows_it(client, models):
    seen: list[str] = []

    def ask() -> bool:
        seen.append(client.keeper.waits_for.reason)
        return len(seen) > 2

    def load() -> None:
        with contextlib.suppress(Cancelled):
            client.load(models[0], ask)

    with client.keeper.lock:
        other = threading.Thread(target=load)
        other.start()
        other.join(60)
        assert client.keeper.waits_for.reason != "turn"  # this thread has its turn
    assert set(seen) == {"turn"}
