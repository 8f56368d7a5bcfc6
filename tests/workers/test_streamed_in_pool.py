"""Weights that come block by block, in a pool: models in turn, one copy on the host, a cancel or a death in a copy."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from parallel_runtime.config import ParallelConfig
from parallel_runtime.errors import PoolError
from parallel_runtime.requests.control import Cancelled
from parallel_runtime.requests.facts import PCIE, known_gpu
from tests.tiny_flux import tiny_config, weights_file, write_diffusers_folder
from tests.workers.loops import make_loop
from workers.client.client import PoolClient
from workers.client.node_requests import ModelRequest
from workers.launch import PoolSpec

CONFIG = tiny_config(num_layers=2, num_single_layers=2)
SIGMAS = torch.linspace(1, 0, 5)


def draw(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


GIVEN = {"context": draw(1, 7, 64, seed=1), "y": draw(1, 32, seed=2), "guidance": torch.full((1,), 3.5)}


def sample(client: PoolClient, model: ModelRequest, **callbacks) -> torch.Tensor:
    request = make_loop("euler", SIGMAS, draw(1, 16, 8, 6), {0: GIVEN}, 1.0, timesteps=SIGMAS)
    return client.sample(model, request, **callbacks)


def host_copy(client: PoolClient) -> int:
    """Bytes of shares in the host's memory, each page counted once (PSS)."""
    total = 0
    for pid in client.status().pids.values():
        for entry in re.split(r"\n(?=[0-9a-f]+-[0-9a-f]+ )", Path(f"/proc/{pid}/smaps").read_text()):
            if "memfd:parallel-dit-share" in entry:
                total += 1024 * int(re.search(r"^Pss:\s+(\d+)", entry, re.M)[1])
    return total


@pytest.mark.slow  # two pools; without processes in the first tier: test_streamed_weights.py
def test_models_in_turn_a_cancel_and_a_death_in_the_middle_of_a_copy(tmp_path, monkeypatch):
    monkeypatch.setenv("TEST_FETCH", str(tmp_path))
    files = [write_diffusers_folder(tmp_path / f"model-{seed}", CONFIG, seed=seed) for seed in (1, 2)]
    sizes = sum(weights_file(path).stat().st_size for path in files)

    def models(weights: str) -> list[ModelRequest]:
        config = ParallelConfig(devices="cpu:2", weights=weights)
        return [ModelRequest(str(path), "float32", config) for path in files]

    client = PoolClient(PoolSpec("cpu", (0, 1)), "tests.workers.faulty_fetch_rank")
    try:
        expected = [sample(client, model) for model in models("whole")]
        assert not torch.equal(*expected)
        pids = dict(client.status().pids)
        for weights in ("dealt", "host"):
            before = host_copy(client)
            coming = models(weights)
            for turn in (0, 1, 0):
                assert torch.equal(sample(client, coming[turn]), expected[turn])
            kept = host_copy(client) - before
            assert 0.5 * sizes < kept < 1.1 * sizes, (kept, sizes)  # one of each model, though two ranks read both

        (tmp_path / "1").write_text("0.5")
        with pytest.raises(Cancelled):
            sample(client, coming[0], should_cancel=(tmp_path / "reached").exists)
        (tmp_path / "1").unlink()
        assert torch.equal(sample(client, coming[0]), expected[0])
        assert client.status().pids == pids  # warm

        (tmp_path / "1").write_text("kill")
        with pytest.raises(PoolError, match="ended in the middle of a job"):
            sample(client, coming[0])
        (tmp_path / "1").unlink()
        for turn in (1, 0):
            assert torch.equal(sample(client, coming[turn]), expected[turn])
        assert not set(pids.values()) & set(client.status().pids.values())

        large = replace(known_gpu("NVIDIA large", 1 << 50, PCIE), measured=True)
        monkeypatch.setattr("workers.client.loading.find_machine", lambda spec: large)
        rooms: list[int] = []
        for _ in range(2):  # the second time it is here
            loaded = client.load(models("whole")[0], make_room=rooms.append)
            assert "Of a GPU's 1048576.0 GiB only" in loaded.explanation  # what this machine's memory has
            assert rooms == [pytest.approx(weights_file(files[0]).stat().st_size, rel=0.1)]
    finally:
        client.close()
