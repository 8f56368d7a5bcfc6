"""On a GPU: memory that comes back to the system, recordings that outlive their weights. One rank, a tiny model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from parallel_runtime.config import ParallelConfig
from parallel_runtime.engine.engine import Engine
from parallel_runtime.requests.conditioning import refer
from parallel_runtime.requests.requests import Forward, Load, Release
from tests.parallel_runtime.gpu_streamed_run import count_recordings
from tests.parallel_runtime.staged_run import Quiet
from tests.tiny_flux import tiny_config, weights_file, write_diffusers_folder

pytestmark = pytest.mark.gpu

LARGER = tiny_config(num_layers=4, num_single_layers=8)
"""About 130 million parameters, so that its weights are more than what PyTorch keeps for itself."""


class GpuRank:
    """An engine of one rank on the current GPU."""

    def __init__(self) -> None:
        self.device = torch.device("cuda", torch.cuda.current_device())
        self.engine = Engine(self.device, 0, 1)

    def run(self, request: Any, tensors: dict[str, torch.Tensor] | None = None) -> Any:
        meta = {name: tensor.to("meta") for name, tensor in (tensors or {}).items()}
        here = {name: tensor.to(self.device) for name, tensor in (tensors or {}).items()}
        with torch.no_grad():
            return self.engine.prepare(request, meta, Quiet()).run(here, Quiet())

    def load(self, path: Path) -> Any:
        config = ParallelConfig(devices=str(self.device.index), compile="off")
        return self.run(Load(str(path), str(path), "bfloat16", config.to_mapping(), 1))[0]

    def forward(self, path: Path) -> torch.Tensor:
        generator = torch.Generator().manual_seed(3)
        draw = lambda *shape: torch.randn(*shape, generator=generator).bfloat16()  # noqa: E731
        given = {"context": draw(1, 64, 64), "y": draw(1, 32), "guidance": torch.full((1,), 3.5)}
        reference, tensors = refer(1, given)
        tensors |= {"x": draw(1, 16, 64, 64), "timestep": torch.full((1,), 0.7)}
        return self.run(Forward(str(path), reference), tensors)[1]["output"].cpu()

    def free(self) -> int:
        torch.cuda.synchronize(self.device)
        return torch.cuda.mem_get_info(self.device)[0]


@pytest.fixture(scope="module")
def files(tmp_path_factory) -> list[Path]:
    folder = tmp_path_factory.mktemp("models")
    return [write_diffusers_folder(folder / f"{seed}", LARGER, seed=seed, dtype=torch.bfloat16) for seed in (1, 2)]


def test_gpu_memory_goes_back_to_the_system_when_a_model_is_unloaded(files):
    rank = GpuRank()
    for _ in range(2):
        rank.load(files[0])
        size = rank.engine.residency.get(str(files[0])).loaded_model.weights.size
        expected = [rank.forward(files[0]) for _ in range(4)]
        assert all(torch.equal(each, expected[0]) for each in expected)
        assert count_recordings(rank.engine, str(files[0])) == 1
        before = rank.free()
        assert rank.run(Release(str(files[0])))[0].bytes_freed == size
        assert rank.free() - before >= size
        assert torch.cuda.memory_reserved(rank.device) <= 64 << 20, "what stays with PyTorch"
        again = rank.forward(files[0])
        assert torch.equal(again, expected[0])
        rank.run(Release(str(files[0])))


def test_a_gpu_that_has_room_for_a_model_once_takes_it(files):
    rank = GpuRank()
    torch.cuda.empty_cache()
    size = weights_file(files[0]).stat().st_size
    rest = rank.free() - (512 << 20) - size * 3 // 2  # with the reserve of a load
    ballast = torch.empty(rest, dtype=torch.uint8, device=rank.device)
    rank.load(files[0])
    assert rank.engine.residency.held()
    rank.run(Release(str(files[0])))
    del ballast
    torch.cuda.empty_cache()


def test_gpu_recordings_outlive_weights_that_left_for_another_model(files, monkeypatch, tmp_path):
    monkeypatch.setenv("PARALLEL_DIT_POOL", str(tmp_path))
    rank = GpuRank()
    for path in files:
        rank.load(path)
    expected = [[rank.forward(path) for _ in range(4)][-1] for path in files]
    assert not torch.equal(*expected)
    store = rank.engine.residency.store
    for _ in range(2):
        for path, prediction in zip(files, expected, strict=True):
            resident = rank.engine.residency.get(str(path))
            before = rank.free()
            store.free_beside(resident.loaded_model, 1 << 60, lambda done, total: None)  # all others leave
            assert set(rank.engine.residency.held()) <= {str(path)}
            assert rank.free() >= before
            assert torch.equal(rank.forward(path), prediction)
            assert [count_recordings(rank.engine, str(each)) for each in files] == [1, 1]
    assert list(tmp_path.glob("*.copy"))
    for path in files:
        rank.run(Release(str(path)))
    assert not list(tmp_path.iterdir())
