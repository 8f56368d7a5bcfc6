"""What is free on the ranks' devices: each has another amount, the least of all decides, and all ranks load alike."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from parallel_runtime import memory
from parallel_runtime.config import ParallelConfig
from parallel_runtime.engine.residency import Residency
from parallel_runtime.planning import cost_constants
from parallel_runtime.requests.facts import CPU as CPU_FACTS
from parallel_runtime.requests.facts import GIB, PCIE, known_gpu
from parallel_runtime.requests.requests import Load, Survey, Surveyed
from tests.parallel_runtime.test_weight_store import CONFIG, Rank
from tests.threaded_ranks import CPU, ThreadedPool
from tests.tiny_flux import tiny_config, weights_file, write_diffusers_folder
from workers.client.loading import surveyed

MIB = 1 << 20


@pytest.fixture
def pool(tmp_path, monkeypatch) -> ThreadedPool:
    for name in (
        "CONTEXT_BYTES",
        "CONTEXT_TO_COME",
        "LIVE_ACTIVATIONS",
        "EXCHANGE_BUFFERS",
    ):  # more than so small a network
        monkeypatch.setattr(cost_constants, name, 0)
    monkeypatch.setattr("parallel_runtime.engine.prepared_load._STEP", 1)
    for name in ("_RESERVE", "_MORE"):
        monkeypatch.setattr(f"parallel_runtime.planning.weights_choice.{name}", 0)
    monkeypatch.setattr("parallel_runtime.requests.facts._CONTEXT_BYTES", 0)
    made = ThreadedPool(3, monkeypatch)
    for rank, engine in enumerate(made.engines):
        engine.residency = Residency(CPU, rank, folder=tmp_path)
    return made


def request(path: Path, ranks: int, whole: int) -> Load:
    machine = replace(known_gpu("NVIDIA large", 100 * whole, PCIE), measured=True)
    config = ParallelConfig(devices=f"cpu:{ranks}", compile="off").to_mapping()
    return Load("m", str(path), "float32", config, ranks, machine)


@pytest.mark.parametrize("ranks", [2, 3])
def test_ranks_with_unlike_free_memory_load_alike_by_the_least_of_those_that_are_used(ranks, pool, tmp_path):
    path = write_diffusers_folder(tmp_path / "m", tiny_config(num_layers=2, num_single_layers=3), seed=1)
    whole = weights_file(path).stat().st_size
    has = [50 * whole, whole * 3 // 4, whole // 10]
    for engine, free in zip(pool.engines, has, strict=True):
        engine.residency.store.could_have = lambda free=free: free  # type: ignore[method-assign]
    submitted: list[Any] = []

    def submit(asked: Survey) -> Any:
        submitted.append(asked)
        answers = pool.submit(asked, {})
        assert answers is not None
        assert {answer.free_each for answer, _ in answers} == {tuple(has[:ranks])}
        return SimpleNamespace(answer=answers[0][0])

    rooms: list[int] = []
    load = surveyed(request(path, ranks, whole), submit, rooms.append)
    assert load.machine is not None
    assert load.machine.free_bytes == min(has[:ranks])
    assert len(submitted) == 2
    assert rooms == [pytest.approx(whole, rel=0.1)]  # were all of the GPU free
    answers = pool.submit(load, {})
    assert answers is not None
    configs = {engine.residency.get("m").wish.config for engine in pool.engines}
    assert len(configs) == 1
    config = configs.pop()
    assert config.weights == ("host" if ranks == 2 else "auto")  # of three, one has no room for any way
    assert config.held == ((5 - config.resident, 0) if ranks == 2 else ())  # the first has room for all blocks
    sizes = [engine.residency.get("m").loaded_model.weights.size for engine in pool.engines[:ranks]]
    assert sizes[0] == pytest.approx(whole, rel=0.1)
    assert (sizes[1] < has[1]) == (ranks == 2)
    assert pool.engines[0].machine.free_each == ()  # later requests find other models here
    # It is here: nobody is asked to make room for it.
    assert surveyed(request(path, ranks, whole), submit, rooms.append).machine == load.machine
    assert len(rooms) == 1


def test_what_the_pool_itself_would_let_go_counts_as_free(tmp_path, monkeypatch):
    path = write_diffusers_folder(tmp_path / "m", CONFIG, seed=1)
    rank = Rank()
    store = rank.engine.residency.store
    rank.load(path)
    size = rank.engine.residency.get(str(path)).loaded_model.weights.size
    monkeypatch.setattr(memory, "free_bytes", lambda device: 3 * GIB + 5 - size * len(rank.here()))
    assert store.could_have() == pytest.approx(3 * GIB, abs=10_000)
    rank.engine.residency.give_back(str(path))
    assert store.could_have() == 3 * GIB + 5
    load = Load("other", str(path), "float32", ParallelConfig(devices="cpu:1").to_mapping(), 1)
    assert rank.run(Survey(load))[0] == Surveyed((3 * GIB,), pytest.approx(size, rel=0.01), {})
    monkeypatch.setattr(memory, "free_bytes", lambda device: 600 * MIB)
    assert rank.run(Survey(load))[0].free_each == (512 * MIB,)


@pytest.mark.slow
def test_room_is_asked_for_what_the_plan_has_on_a_gpu_not_for_the_whole_model(tmp_path):
    path = write_diffusers_folder(tmp_path / "m", tiny_config(num_layers=2, num_single_layers=12), seed=1)
    rank, rooms = Rank(), []
    for weights in ("whole", "host"):
        config = ParallelConfig(devices="cpu:1", weights=weights).to_mapping()
        load = Load(weights, str(path), "float32", config, 1, CPU_FACTS)
        surveyed(load, lambda asked: SimpleNamespace(answer=rank.run(asked)[0]), rooms.append)
        rank.load(path, weights, weights=weights)
        assert rank.engine.residency.get(weights).loaded_model.weights.size == pytest.approx(rooms[-1], rel=0.1)
    whole, host = rooms
    assert host < whole * 0.7
