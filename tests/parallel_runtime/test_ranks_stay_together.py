"""Ranks never part ways: whatever is asked of a pool, and whatever happens to one rank alone, all ranks of a group
make the same collective calls, groups, exchanges of memory and recordings, and none is left waiting."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from parallel_runtime.config import ParallelConfig
from parallel_runtime.engine import rank_state
from parallel_runtime.engine import rank_state as meshes
from parallel_runtime.engine.opened import Opened, open_model
from parallel_runtime.errors import CheckpointError
from parallel_runtime.requests.conditioning import refer
from parallel_runtime.requests.requests import ConditioningRef, Forward, Load, Release, Sample, Step
from tests import tiny_flux
from tests.threaded_ranks import PartedWays, ThreadedPool

WORLD = 4
CONFIGURATIONS: list[dict[str, Any]] = [
    {"ulysses": 2},
    {"ulysses": 4},
    {"ulysses": 3},
    {"cfg": 2, "ulysses": 2},
    {"data": 2, "ulysses": 2},
    {},
    {"pipe": 2, "patches": 2},
    {"pipe": 2, "ulysses": 2, "patches": 2},
]
SIZES = [(6, 4), (8, 6)]


class Prompt(NamedTuple):
    """One prompt.

    Args:
        configuration: into CONFIGURATIONS.
        model: of two.
        sampled: in the pool, else call by call, of which all but the first are not prepared.
        size: into SIZES.
        texts: lengths of the CFG branches' texts.
        times: steps, or calls.
        fails: see `ThreadedPool.submit`; in the request after loading, or in loading.
        in_loading: where it fails.
        troubles: what rank 1, alone, cannot do meanwhile.
    """

    configuration: int
    model: int = 0
    compile: bool = False
    sampled: bool = True
    size: int = 0
    texts: tuple[int, ...] = (3,)
    times: int = 4
    fails: tuple[int, bool] | None = None
    in_loading: bool = False
    troubles: frozenset[str] = frozenset()


class Unload(NamedTuple):
    """Unload Models."""

    model: int


TROUBLES = ("no_room", "no_peer_memory", "cannot_record", "loses")
PROMPTS = st.builds(
    Prompt,
    configuration=st.integers(0, len(CONFIGURATIONS) - 1),
    model=st.integers(0, 1),
    compile=st.booleans(),
    sampled=st.booleans(),
    size=st.integers(0, 1),
    texts=st.sampled_from([(3,), (3, 3), (3, 5)]),
    times=st.integers(1, 4),
    fails=st.none() | st.tuples(st.integers(0, WORLD - 1), st.booleans()),
    in_loading=st.booleans(),
    troubles=st.frozensets(st.sampled_from(TROUBLES), max_size=1),
)
REQUESTS = st.lists(PROMPTS | st.builds(Unload, st.integers(0, 1)), min_size=2, max_size=6)


class Client:
    """What ComfyUI's process does: it loads a model that the pool does not know, and again where a request failed."""

    def __init__(self, pool: ThreadedPool, paths: list[Path]):
        self.pool, self.paths = pool, paths
        self.named: dict[str, int] = {}  # models that the pool knows
        self.conditionings = 0

    def do(self, request: Prompt | Unload) -> None:
        if isinstance(request, Unload):
            for key in [key for key, model in self.named.items() if model == request.model]:
                self.submit(Release(key), {})
            return
        loading = self.load(request)
        troubled = min(1, len(self.pool.engines) - 1)
        for trouble in TROUBLES:
            setattr(self.pool.hardware, trouble, {troubled} if trouble in request.troubles else set())
        if request.fails is not None:
            request = request._replace(fails=(request.fails[0] % len(self.pool.engines), request.fails[1]))
        if "loses" in request.troubles:
            self.pool.engines[troubled].residency.store.free()
        if request.fails is not None and request.in_loading:
            self.named.clear()
            self.submit(loading, {}, request.fails)
        if loading.model not in self.named:
            self.submit(loading, {})
            self.named[loading.model] = request.model
        asked, tensors = (
            self.sample(request, loading.model) if request.sampled else self.forward(request, loading.model)
        )
        if request.fails is not None and not request.in_loading:
            self.submit(asked, tensors, request.fails)
            if request.fails[1]:  # that rank has let its model go
                self.submit(loading, {})
        self.submit(asked, tensors)
        for _ in range(0 if request.sampled else request.times - 1):
            if "loses" in request.troubles:
                self.pool.engines[troubled].residency.store.free()
            self.pool.repeat(Step(asked.kind), {name: tensors[name] for name in ("x", "timestep")})

    def submit(self, request: Any, tensors: dict[str, torch.Tensor], fails: tuple[int, bool] | None = None) -> None:
        answers = self.pool.submit(request, tensors, fails)
        latents = [results["latent"] for _, results in answers or () if "latent" in results]
        assert all(torch.equal(latent, latents[0]) for latent in latents)

    def load(self, request: Prompt) -> Load:
        degrees = CONFIGURATIONS[request.configuration]
        ranks = 1
        for axis in ("data", "cfg", "pipe", "ulysses"):
            ranks *= degrees.get(axis, 1)
        config = ParallelConfig(devices=f"cpu:{ranks}", compile=request.compile, **degrees)
        key = f"{request.model} {request.configuration} {request.compile}"
        return Load(key, str(self.paths[request.model]), "float32", config.to_mapping(), ranks)

    def refer(self, index: int, batch: int, text: int) -> tuple[ConditioningRef, dict[str, torch.Tensor]]:
        self.conditionings += 1
        generator = torch.Generator().manual_seed(text + index)
        given = {
            "context": torch.randn(batch, text, 64, generator=generator),
            "y": torch.randn(batch, 32, generator=generator),
            "guidance": torch.full((batch,), 3.5),
        }
        return refer(self.conditionings, given, index)

    def sample(self, request: Prompt, model: str) -> tuple[Sample, dict[str, torch.Tensor]]:
        sigmas = torch.linspace(1, 0, request.times + 1)
        x = torch.randn(1, 16, *SIZES[request.size], generator=torch.Generator().manual_seed(5))
        tensors = {"x": x, "sigmas": sigmas, "timesteps": sigmas}
        branches = []
        for index, text in enumerate(request.texts):
            reference, own = self.refer(index, 1, text)
            branches.append(reference)
            tensors |= own
        cfg = 2.0 if len(branches) > 1 else 1.0
        return Sample(model, "euler", tuple(branches), cfg), tensors

    def forward(self, request: Prompt, model: str) -> tuple[Forward, dict[str, torch.Tensor]]:
        batch = len(request.texts)
        reference, tensors = self.refer(0, batch, request.texts[0])
        tensors |= {"x": torch.zeros(batch, 16, *SIZES[request.size]), "timestep": torch.full((batch,), 0.5)}
        kept = tuple(range(reference.id))
        return Forward(model, reference, kind=reference.id, kept_kinds=kept), tensors


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Path]]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp("models")
    config = tiny_flux.tiny_config(num_layers=1, num_single_layers=1)
    yield [tiny_flux.write_diffusers_folder(folder / f"{seed}", config, seed=seed) for seed in range(2)]
    torch.set_num_threads(threads)


TO_FEWER_AND_BACK = [Prompt(0), Prompt(5, size=1), Prompt(0, size=1)]
"""As a pool of two H200s was lost: devices 0,1 at one size, device 0 at another, and that size on both."""
NO_PEER_MEMORY = [Prompt(1), Prompt(1, size=1, troubles=frozenset({"no_peer_memory"})), Prompt(1, size=1)]
UNLOADED_BETWEEN_FAILURES = [
    Prompt(1),
    Unload(0),
    Prompt(1, fails=(2, True), in_loading=True),
    Prompt(1, model=1, fails=(1, False)),
    Unload(0),
    Prompt(0, model=1),
    Prompt(1, size=1, sampled=False),
]
LOSES = [Prompt(0, sampled=False, troubles=frozenset({"loses"})), Prompt(0, sampled=False, size=1)]


@pytest.mark.slow
@settings(max_examples=6, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(requests=REQUESTS)
@example(requests=TO_FEWER_AND_BACK)
@example(requests=[Prompt(3, texts=(3, 5), troubles=frozenset({"cannot_record"})), Prompt(1)])
@example(requests=[Prompt(4, texts=(3, 3)), Prompt(4), Prompt(1)])
@example(requests=[Prompt(0, fails=(1, True)), Prompt(0), Prompt(0, size=1)])
@example(requests=[Prompt(1), Prompt(1, size=1, troubles=frozenset({"no_peer_memory"})), Prompt(1, size=1)])
@example(requests=[Prompt(0, sampled=False, troubles=frozenset({"loses"})), Prompt(0, sampled=False, size=1)])
@example(requests=[Prompt(7), Prompt(6), Prompt(1), Prompt(7, size=1)])
@example(requests=[Prompt(0), Prompt(5), Prompt(3, texts=(3, 3)), Prompt(0)])
@example(requests=[Prompt(6), Prompt(0, compile=True), Prompt(7), Prompt(0, compile=True)])
@example(requests=UNLOADED_BETWEEN_FAILURES)
def test_ranks_stay_together_whatever_is_asked_and_whatever_happens_to_one(paths, requests):
    do_all(paths, requests)


@pytest.mark.long
@settings(max_examples=40, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(requests=REQUESTS)
def test_ranks_stay_together_whatever_else_is_asked(paths, requests):
    do_all(paths, requests)


def do_all(paths: list[Path], requests: list[Prompt | Unload]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(meshes, "KEPT", 2)  # groups are left and joined again
        client = Client(ThreadedPool(WORLD, patch), paths)
        for request in requests:
            client.do(request)


@pytest.mark.parametrize("troubles", [frozenset(), frozenset({"no_peer_memory"})])
def test_ranks_that_do_not_reach_each_other_stay_together_over_the_hosts_memory(paths, troubles):
    with pytest.MonkeyPatch.context() as patch:
        pool = ThreadedPool(WORLD, patch, near=False)
        client = Client(pool, paths)
        for request in (Prompt(0, troubles=troubles), Prompt(3, texts=(3, 5), sampled=False), Unload(0), *LOSES):
            client.do(request)
        pairs = [memory for each in pool.engines[:2] for memory in each.meshes.groups._memory.values()]
        assert {memory._peers.made for memory in pairs} == {0}
        assert {memory.made for memory in pairs} == {2 if not troubles else 1}  # and again after the unload


def test_plans_over_the_same_ranks_share_groups_and_memory_that_an_unload_frees(paths):
    with pytest.MonkeyPatch.context() as patch:
        pool = ThreadedPool(WORLD, patch)
        client = Client(pool, paths)
        client.do(Prompt(3, texts=(3, 3)))
        made = dict(pool.communicator.made)
        client.do(Prompt(4, model=1, texts=(3, 3)))  # data 2 instead of cfg 2
        assert pool.communicator.made == made != {}
        groups = [engine.meshes.groups for engine in pool.engines]

        def sizes() -> list[list[int]]:
            return [[routes._peers._size + routes._host._size for routes in each._memory.values()] for each in groups]

        assert sizes() == [[64 << 20]] * WORLD
        client.do(Unload(1))
        assert sizes() == [[64 << 20]] * WORLD  # the other is there
        client.do(Unload(0))
        assert sizes() == [[0]] * WORLD


def test_the_groups_of_plans_that_are_not_used_any_more_are_destroyed(paths):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(meshes, "KEPT", 2)
        pool = ThreadedPool(WORLD, patch)
        client = Client(pool, paths)
        for configuration in (0, 2, 7):
            client.do(Prompt(configuration, times=1))
        assert all((0, 1, 2) in [ranks for ranks, _ in engine.meshes.groups._made] for engine in pool.engines)
        client.do(Prompt(0, times=1))
        assert all((0, 1, 2) not in [ranks for ranks, _ in engine.meshes.groups._made] for engine in pool.engines)


@pytest.mark.parametrize("configuration", [0, 5, 6])
def test_a_rank_outside_of_a_plan_has_nobody_to_wait_for(paths, configuration):
    """Where those inside fail alike, in a loop too, it is through, and the pool lives."""
    with pytest.MonkeyPatch.context() as patch:
        pool = ThreadedPool(WORLD, patch)
        client = Client(pool, paths)
        client.do(Prompt(configuration))
        before = [pool.communicator.calls_of(rank) for rank in range(WORLD)]
        client.do(Prompt(configuration))
        calls = [pool.communicator.calls_of(rank) - count for rank, count in enumerate(before)]
        assert calls[2:] == [0, 0]
        assert [prepared.takes_part for prepared in pool.prepared] == [True, configuration != 5, False, False]
        assert all(calls[:2]) or configuration == 5


def test_hosts_that_read_different_models_stop_before_they_plan_differently(paths):
    with pytest.MonkeyPatch.context() as patch:
        client = Client(ThreadedPool(WORLD, patch), paths)
        opened: list[Opened] = []

        def read(request: Load, device: Any) -> Opened:
            opened.append(open_model(request, device))
            facts = opened[-1].facts
            opened[-1].facts = replace(facts, heads=facts.heads + (len(opened) == 2))
            return opened[-1]

        patch.setattr(rank_state, "open_model", read)
        with pytest.raises(CheckpointError, match="different models at "):
            client.do(Prompt(0))


def test_the_communicator_sees_ranks_that_part_ways(paths):
    with pytest.MonkeyPatch.context() as patch:
        client = Client(ThreadedPool(WORLD, patch), paths)
        client.do(Prompt(0, sampled=False))
        recorded = client.pool.engines[1].residency.get(next(iter(client.named))).network._recorded
        recorded._over[0, 1].kinds.clear()  # behind its back
        with pytest.raises(PartedWays):
            client.do(Prompt(0, sampled=False))
