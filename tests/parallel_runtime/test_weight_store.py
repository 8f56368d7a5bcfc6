"""What a rank holds: several models on one device, memory that comes back, modules that outlive their weights."""

from __future__ import annotations

import dataclasses
import itertools
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch

from benchmarks.load_transformer import load_transformer
from parallel_runtime import memory
from parallel_runtime.config import ParallelConfig
from parallel_runtime.engine import residency
from parallel_runtime.engine.engine import Engine
from parallel_runtime.engine.residency import Residency
from parallel_runtime.engine.weight_store import WeightStore
from parallel_runtime.errors import CheckpointError, NotLoadedError, OutOfMemoryError
from parallel_runtime.gpu_memory.arena import PlainArena, lay_out
from parallel_runtime.loading import loaded_weights, reading
from parallel_runtime.loading.checkpoint import CheckpointReader, open_checkpoint
from parallel_runtime.loading.files import identity
from parallel_runtime.loading.host_copies import HostCopies
from parallel_runtime.loading.loaded_weights import LoadedWeights
from parallel_runtime.requests.conditioning import refer
from parallel_runtime.requests.control import Cancelled
from parallel_runtime.requests.requests import Forward, Load, Release
from tests.parallel_runtime.staged_run import Quiet
from tests.tiny_flux import make_state_dict, tiny_config, weights_file, write_diffusers_folder

CPU = torch.device("cpu")
CONFIG = tiny_config(num_layers=1, num_single_layers=1)


@pytest.fixture(scope="module")
def files(tmp_path_factory) -> list[Path]:
    """Two models of one family with unlike weights."""
    folder = tmp_path_factory.mktemp("models")
    return [write_diffusers_folder(folder / f"{seed}", CONFIG, seed=seed) for seed in (1, 2)]


class Rank:
    """An engine of one rank, whose weights lie in a region of memory as on a GPU."""

    def __init__(self, folder: Path | None = None):
        self.engine = Engine(CPU, 0, 1)
        self.engine.residency = Residency(CPU, 0, folder=folder)

    def run(self, request: Any, tensors: dict[str, torch.Tensor] | None = None) -> Any:
        meta = {name: tensor.to("meta") for name, tensor in (tensors or {}).items()}
        return self.engine.prepare(request, meta, Quiet()).run(tensors or {}, Quiet())

    def load(self, path: Path, name: str = "", **options: Any) -> Any:
        config = ParallelConfig(devices="cpu:1", **options)
        return self.run(Load(name or str(path), str(path), "float32", config.to_mapping(), 1))[0]

    def forward(self, name: Path | str) -> torch.Tensor:
        generator = torch.Generator().manual_seed(3)
        draw = lambda *shape: torch.randn(*shape, generator=generator)  # noqa: E731
        given = {"context": draw(1, 7, 64), "y": draw(1, 32), "guidance": torch.full((1,), 3.5)}
        reference, tensors = refer(1, given)
        tensors |= {"x": draw(1, 16, 8, 6), "timestep": torch.full((1,), 0.7)}
        with torch.no_grad():
            return self.run(Forward(str(name), reference), tensors)[1]["output"]

    def here(self) -> list[str]:
        return [Path(name).stem for name in self.engine.residency.held()]


@pytest.fixture(scope="module")
def expected(files) -> list[torch.Tensor]:
    """Each model's prediction, in a rank of its own."""
    predictions = []
    for path in files:
        rank = Rank()
        rank.load(path)
        predictions.append(rank.forward(path))
        rank.run(Release(str(path)))
    assert not torch.equal(*predictions)
    return predictions


def leave_room_for(models: int, path: Path, monkeypatch, rank: Rank) -> None:
    """Let the device have room for that many models."""
    size = (weights_file(path) if path.is_dir() else path).stat().st_size

    def free(device: torch.device) -> int:
        return models * size + size // 2 - size * len(rank.here())

    monkeypatch.setattr(memory, "free_bytes", free)


def mapped_files() -> str:
    return Path("/proc/self/maps").read_text()


@pytest.mark.parametrize(
    ("stored", "wanted"), [("float32", "float32"), ("bfloat16", "float32"), ("float32", "float16")]
)
def test_a_region_holds_what_the_mapped_file_gives(stored, wanted, tmp_path, monkeypatch):
    """Other types, and pieces that are cut."""
    monkeypatch.setattr(reading, "BUFFER", 10_000)
    checkpoint = open_checkpoint(write_diffusers_folder(tmp_path / "m", CONFIG, dtype=getattr(torch, stored)))
    dtype = getattr(torch, wanted)
    expected = load_transformer(checkpoint, dtype, CPU).state_dict()
    weights = LoadedWeights(CheckpointReader(checkpoint, dtype), CPU)
    told: list[tuple[int, int]] = []
    weights.fill(lambda done, total: told.append((done, total)))
    loaded = weights.network.state_dict()
    assert loaded.keys() == expected.keys()
    assert all(torch.equal(loaded[name], expected[name]) for name in expected)
    assert told[-1][0] == told[-1][1] > 0


def test_places_do_not_overlap():
    sizes = {"a": 3, "q": 40, "x": 513, "k": 40, "v": 40}
    starts, size = lay_out(sizes)
    spans = sorted((start, start + sizes[name]) for name, start in starts.items())
    assert all(end <= start for (_, end), (start, _) in itertools.pairwise(spans))
    assert all(starts[name] % 512 == 0 for name in ("a", "q", "x"))
    assert size == max(end for _, end in spans)


def test_nothing_of_a_released_model_is_alive_when_the_memory_is_cleaned(files, expected, monkeypatch):
    rank = Rank()
    rank.load(files[0])
    assert torch.equal(rank.forward(files[0]), expected[0])
    resident = rank.engine.residency.get(str(files[0]))
    pointers = {p.untyped_storage().data_ptr() for p in resident.network.parameters()}
    assert str(files[0]) not in mapped_files()
    seen: list[Any] = []

    def clean(store: WeightStore) -> None:
        alive = {p.untyped_storage().data_ptr(): p.untyped_storage().nbytes() for p in resident.network.parameters()}
        seen.append(sum(size for pointer, size in alive.items() if pointer in pointers))

    monkeypatch.setattr(WeightStore, "clean", clean)
    assert rank.run(Release(str(files[0])))[0].bytes_freed == resident.loaded_model.weights.size > 0
    assert seen == [0]
    assert rank.here() == []
    assert rank.run(Release(str(files[0])))[0].bytes_freed == 0


def test_after_a_release_the_same_modules_are_filled_again(files, expected):
    rank = Rank()
    rank.load(files[0])
    before = rank.engine.residency.get(str(files[0])).network
    rank.run(Release(str(files[0])))
    assert torch.equal(rank.forward(files[0]), expected[0])  # also without a load
    rank.run(Release(str(files[0])))
    assert rank.load(files[0]).reused
    assert rank.engine.residency.get(str(files[0])).network is before
    assert torch.equal(rank.forward(files[0]), expected[0])


@pytest.mark.parametrize("room", [1, 2])
def test_models_in_turn_give_what_each_gives_alone(room, files, expected, monkeypatch):
    rank = Rank()
    leave_room_for(room, files[0], monkeypatch, rank)
    for path in files:
        rank.load(path)
    modules = [rank.engine.residency.get(str(path)).network for path in files]
    for _ in range(2):
        for path, prediction in zip(files, expected, strict=True):
            assert torch.equal(rank.forward(path), prediction)
            assert len(rank.here()) == room
            assert path.stem in rank.here()
    assert modules == [rank.engine.residency.get(str(path)).network for path in files]


@pytest.mark.parametrize("weights", ["whole", "host"])
def test_a_model_needs_its_memory_once(weights, files, expected, monkeypatch):
    """Its region has memory from the start, which is not free when its weights come."""
    taken: list[int] = []

    def make(size: int, device: torch.device) -> PlainArena:
        taken.append(size)
        return PlainArena(size, device)

    rank = Rank()
    monkeypatch.setattr(loaded_weights, "make_arena", make)
    room = weights_file(files[0]).stat().st_size * 3 // 2
    monkeypatch.setattr(memory, "free_bytes", lambda device: room - sum(taken))
    rank.load(files[0], weights=weights)
    assert sum(taken) > room // 3
    assert torch.equal(rank.forward(files[0]), expected[0])


def test_a_load_that_fails_before_its_weights_are_read_leaves_no_memory_taken(files, monkeypatch):
    made: list[PlainArena] = []

    def make(size: int, device: torch.device) -> PlainArena:
        made.append(PlainArena(size, device))
        return made[-1]

    def fail(self: Any, opened: Any, on_bytes: Any) -> None:
        raise CheckpointError("It cannot be read.", "Choose another.")

    rank = Rank()
    monkeypatch.setattr(loaded_weights, "make_arena", make)
    monkeypatch.setattr(LoadedWeights, "_read", fail)
    with pytest.raises(CheckpointError):
        rank.load(files[0])
    assert made[0].memory.untyped_storage().nbytes() == 0


def test_models_that_are_all_here_are_not_read_again(files, monkeypatch):
    rank = Rank()
    for path in files:
        rank.load(path)
    monkeypatch.setattr(reading, "read", None)
    monkeypatch.setattr("parallel_runtime.loading.loaded_weights.read", None)
    for path in (*files, *files):
        rank.forward(path)
    assert [rank.load(path).reused for path in files] == [True, True]


def test_the_least_recently_used_model_goes_first(files, tmp_path, monkeypatch):
    third = write_diffusers_folder(tmp_path / "3", CONFIG, seed=3)
    rank = Rank()
    leave_room_for(2, files[0], monkeypatch, rank)
    for path in files:
        rank.load(path)
    rank.forward(files[0])
    rank.load(third)
    assert rank.here() == ["1", "3"]


def test_a_model_that_cannot_fit_is_refused_before_others_go(files, monkeypatch):
    rank = Rank()
    rank.load(files[0])
    monkeypatch.setattr(memory, "free_bytes", lambda device: 1000)
    larger = write_diffusers_folder(files[0].with_name("larger"), tiny_config(num_layers=3))
    with pytest.raises(OutOfMemoryError, match="FLUX.1 in float32"):
        rank.load(larger)
    assert rank.here() == ["1"]
    with pytest.raises(NotLoadedError):
        rank.forward(larger)


def test_two_configurations_of_one_file_share_its_weights(files, expected):
    rank = Rank()
    for name, options in {"plain": {}, "other": {"attention": "math"}, "degrees": {"ulysses": 1}}.items():
        rank.load(files[0], name, **options)
    plain, other, degrees = (rank.engine.residency.get(name) for name in ("plain", "other", "degrees"))
    assert plain.network is degrees.network is not other.network
    assert [p.data_ptr() for p in plain.network.parameters()] == [p.data_ptr() for p in other.network.parameters()]
    assert torch.equal(rank.forward("plain"), expected[0])
    assert torch.allclose(rank.forward("other"), expected[0], atol=1e-5)
    rank.run(Release("plain"))
    assert torch.equal(rank.forward("degrees"), expected[0])


@pytest.mark.slow
def test_a_file_that_was_replaced_is_read_anew_and_its_old_weights_go(tmp_path):
    path = write_diffusers_folder(tmp_path / "m", CONFIG, seed=1)
    rank = Rank()
    rank.load(path)
    before = rank.forward(path)
    os.replace(weights_file(write_diffusers_folder(tmp_path / "new", CONFIG, seed=2)), weights_file(path))
    assert torch.equal(rank.forward(path), before)
    rank.run(Release(str(path)))
    with pytest.raises(NotLoadedError, match="replaced"):
        rank.forward(path)
    assert not rank.load(path).reused
    assert not torch.equal(rank.forward(path), before)
    assert len(rank.engine.residency.store.models) == 1


def test_a_cancel_or_a_failure_in_the_middle_of_a_load_leaves_no_memory_taken(files, monkeypatch):
    arenas: list[PlainArena] = []

    def make(size: int, device: torch.device) -> PlainArena:
        arenas.append(PlainArena(size, device))
        return arenas[-1]

    class Cancelling(Quiet):
        def before_compiling(self) -> None:
            pass

        def check_cancel(self) -> None:
            raise Cancelled

    rank = Rank()
    monkeypatch.setattr(loaded_weights, "make_arena", make)
    config = ParallelConfig(devices="cpu:1").to_mapping()
    with pytest.raises(Cancelled):
        rank.engine.prepare(Load("m", str(files[0]), "float32", config, 1), {}, Cancelling())
    assert [arena.memory.untyped_storage().nbytes() for arena in arenas] == [0]
    assert rank.load(files[0], "m") is not None
    rank.forward("m")


def test_a_load_that_another_rank_could_not_do_is_undone_where_it_was_new(files):
    rank = Rank()
    config = ParallelConfig(devices="cpu:1").to_mapping()
    request = Load("m", str(files[0]), "float32", config, 1)
    rank.engine.prepare(request, {}, Quiet()).undo()
    assert rank.here() == []
    with pytest.raises(NotLoadedError):
        rank.forward("m")
    rank.run(request)
    rank.engine.prepare(request, {}, Quiet()).undo()
    rank.forward("m")


def test_names_are_forgotten_in_the_order_of_their_use(files, monkeypatch):
    monkeypatch.setattr(residency, "MOST", 2)
    rank = Rank()
    rank.load(files[0], "a")
    rank.load(files[0], "b", attention="math")
    rank.forward("a")
    rank.load(files[1], "c")
    with pytest.raises(NotLoadedError):
        rank.forward("b")
    store = rank.engine.residency.store
    assert [len(held.networks) for held in store.models.values()] == [1, 1]
    rank.load(files[1], "d")
    assert len(store.models) == 1


def test_a_file_that_shrinks_while_it_is_read_is_an_error_of_the_file(tmp_path):
    path = write_diffusers_folder(tmp_path / "m", CONFIG)
    checkpoint = open_checkpoint(path)
    os.truncate(weights_file(path), weights_file(path).stat().st_size // 2)
    shrunk = dataclasses.replace(checkpoint, identity=identity(path))
    weights = LoadedWeights(CheckpointReader(shrunk, torch.float32), CPU)
    with pytest.raises(CheckpointError, match="shorter"):
        weights.fill(lambda done, total: None)


def test_the_state_dict_of_the_file_is_what_is_read(files):
    rank = Rank()
    rank.load(files[0])
    loaded = rank.engine.residency.get(str(files[0])).network.transformer.state_dict()
    expected = make_state_dict(CONFIG, seed=1)
    assert all(torch.equal(loaded[name], tensor) for name, tensor in expected.items())


def test_a_model_that_leaves_is_parked_once_for_all_ranks_and_comes_back_without_its_file(
    files, expected, tmp_path, monkeypatch
):
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=1 << 40, total=1 << 40))
    ranks = [Rank(folder=tmp_path), Rank(folder=tmp_path)]
    made = []
    plain = HostCopies._begin
    monkeypatch.setattr(HostCopies, "_begin", lambda *given: made.append(plain(*given)) or made[-1])
    for path in files:
        for rank in ranks:
            leave_room_for(1, files[0], monkeypatch, rank)
            rank.load(path)
    assert [copy is None for copy in made] == [False, True]
    monkeypatch.setattr("parallel_runtime.loading.loaded_weights.read", None)
    for path, prediction in zip(files, expected, strict=True):
        for rank in ranks:
            leave_room_for(1, files[0], monkeypatch, rank)
            assert torch.equal(rank.forward(path), prediction)
            assert rank.here() == [path.stem]
    for rank in ranks:
        for path in files:
            rank.run(Release(str(path)))
    assert list(tmp_path.iterdir()) == []
    assert "parallel-dit-share" not in mapped_files()


@pytest.mark.parametrize("reason", ["no room", "no folder"])
def test_a_model_that_cannot_be_parked_is_read_again(reason, files, expected, tmp_path, monkeypatch):
    host = SimpleNamespace(available=1 << 40 if reason == "no folder" else 1 << 20, total=1 << 40)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: host)
    rank = Rank(folder=None if reason == "no folder" else tmp_path)
    leave_room_for(1, files[0], monkeypatch, rank)
    for path in files:
        rank.load(path)
    assert list(tmp_path.iterdir()) == []
    assert torch.equal(rank.forward(files[0]), expected[0])


def test_a_cancel_while_a_model_is_parked_leaves_no_half_a_copy(tmp_path, monkeypatch):
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=1 << 40, total=1 << 40))
    copies = HostCopies(tmp_path)

    def cancelled() -> None:
        with copies.make("key", 1000) as copy:
            assert copy is not None
            assert HostCopies(tmp_path).find("key", 1000) is None
            raise Cancelled

    with pytest.raises(Cancelled):
        cancelled()
    assert list(tmp_path.iterdir()) == []
    with copies.make("key", 1000) as copy:
        assert copy is not None
        copy.memory.fill_(7)
    other = HostCopies(tmp_path).find("key", 1000)
    assert other is not None
    assert other.memory.eq(7).all()
    assert HostCopies(tmp_path).find("key", 999) is None
    other.close()


def test_other_models_leave_where_a_run_may_need_their_room(files, monkeypatch):
    rank = Rank()
    for path in files:
        rank.load(path)
    free = [10 << 30]
    monkeypatch.setattr(memory, "free_bytes", lambda device: free[0])
    rank.forward(files[0])
    assert sorted(rank.here()) == ["1", "2"]
    free[0] = 300_000  # enough for what is certain, too little for what is likely
    rank.forward(files[0])
    assert rank.here() == ["1"]


def test_what_does_not_fit_at_once_fits_when_all_else_has_gone(files, expected, monkeypatch):
    tries = []

    class Full(PlainArena):
        def take(self) -> None:
            tries.append(rank.here())
            if len(tries) == 1:
                raise torch.OutOfMemoryError("in pieces")
            super().take()

    rank = Rank()
    monkeypatch.setattr(loaded_weights, "make_arena", Full)
    rank.load(files[0])
    rank.load(files[1])
    rank.run(Release(str(files[0])))
    tries.clear()
    assert torch.equal(rank.forward(files[0]), expected[0])
    assert tries == [["2"], []]


def test_a_load_explains_the_plan_of_the_size_that_it_is_told(files):
    rank, config = Rank(), ParallelConfig(devices="cpu:1").to_mapping()
    tokens = [
        rank.run(Load("m", str(files[0]), "float32", config, 1, size=size))[0].details.tokens
        for size in ((1024, 1024), (832, 1216))
    ]
    assert tokens == [4096, 52 * 76]
