"""A pool that compiles: it tells for how long while it does, and the next pool finds the result on disk."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from parallel_runtime.config import ParallelConfig
from tests.tiny_flux import tiny_config, write_diffusers_folder
from tests.workers.loops import make_loop
from tests.workers.test_pool import conditioning, latent
from workers.client.client import PoolClient
from workers.client.node_requests import ModelRequest
from workers.launch import PoolSpec


@pytest.fixture
def model(tmp_path):
    path = write_diffusers_folder(tmp_path / "tiny", tiny_config(num_layers=0, num_single_layers=1))
    return ModelRequest(str(path), "float32", ParallelConfig(devices="cpu:1", compile=True))


def sample(model: ModelRequest) -> tuple[torch.Tensor, list[str]]:
    """Sample in a fresh pool; return the latent and what was told, in order."""
    told: list[str] = []
    request = make_loop("euler", torch.linspace(1, 0, 4), latent(), {0: conditioning()}, 1.0)
    client = PoolClient(PoolSpec("cpu", (0,)))

    def listen() -> bool:
        if client.keeper.waits_for.reason == "compile":
            told.append("compiling")
        return False

    try:
        result = client.sample(
            model,
            request,
            on_progress=lambda step, *_: told.append(f"step {step}"),
            should_cancel=listen,
        )
    finally:
        client.close()
    return result, told


def compiled_graphs(folder: Path) -> set[str]:
    """Entries of PyTorch's cache of compiled graphs."""
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}


@pytest.mark.slow
def test_compiling_is_told_while_it_goes_on_and_is_not_repeated_by_the_next_pool(model, tmp_path, monkeypatch):
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    cache = tmp_path / "parallel-dit" / "compiled" / "fxgraph"
    first, told = sample(model)
    assert told[0] == "compiling"
    assert [what for what in told if what != "compiling"] == ["step 0", "step 1", "step 2"]
    assert "compiling" not in told[told.index("step 0") :]
    graphs = compiled_graphs(cache)
    assert graphs

    second, _ = sample(model)
    assert torch.equal(first, second)
    assert compiled_graphs(cache) == graphs
