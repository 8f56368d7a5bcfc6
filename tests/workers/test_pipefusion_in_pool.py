"""PipeFusion through the pool: each rank loads its own blocks, exact where it should be, cancelled cleanly."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from parallel_runtime.config import ParallelConfig
from parallel_runtime.errors import ConfigurationError, RequestError
from parallel_runtime.requests.control import Cancelled
from tests.tiny_flux import tiny_config, write_diffusers_folder
from tests.workers.loops import make_loop
from tests.workers.test_pool import conditioning, latent, oracle
from workers.client.client import PoolClient
from workers.client.node_requests import ModelRequest
from workers.launch import PoolSpec

PIPED = ParallelConfig(devices="cpu:2", pipe=2, patches=3, warmup_steps=1)


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    config = tiny_config(num_layers=3, num_single_layers=3)
    return write_diffusers_folder(tmp_path_factory.mktemp("models") / "tiny", config)


@pytest.fixture(scope="module")
def client():
    client = PoolClient(PoolSpec("cpu", (0, 1)))
    yield client
    client.close()


def model(path, **changes):
    return ModelRequest(str(path), "float32", replace(PIPED, **changes))


def request(steps: int = 4, sampler: str = "euler", **more):
    return make_loop(sampler, torch.linspace(1, 0, steps + 1), latent(), {0: conditioning()}, 1.0, **more)


@pytest.mark.slow
def test_each_rank_holds_about_its_share_of_the_weights(client, path):
    whole = client.load(model(path, pipe=1))
    staged = client.load(model(path))
    assert staged.bytes_per_rank < 0.75 * whole.bytes_per_rank  # embedders and final layers are on every rank
    assert "2 stages" in staged.explanation
    assert (whole.stages, staged.stages) == (1, 2)


@pytest.mark.slow
def test_a_picture_of_one_patch_is_exact_with_any_sampler(client, path):
    for sampler in ("euler", "dpmpp_2m"):
        exact = client.sample(model(path, pipe=1), request(sampler=sampler))
        in_turn = client.sample(model(path, patches=1), request(sampler=sampler))
        assert (in_turn - exact).abs().max() < 1e-5 * exact.abs().max()


def test_a_single_call_is_exact_and_shared_between_the_stages(client, path):
    x, timestep, given = latent(2), torch.tensor([0.3, 0.9]), conditioning(batch=2)
    output = client.forward(model(path), x, timestep, given)
    expected = oracle(path, x, timestep, given)
    assert (output - expected).abs().max() < 1e-5 * expected.abs().max()


def test_warm_up_throughout_is_exact_and_later_steps_are_close(client, path):
    exact = client.sample(model(path, pipe=1), request())
    scale = exact.abs().max()
    warm = client.sample(model(path, warmup_steps=4), request())
    stale = client.sample(model(path), request())
    assert (warm - exact).abs().max() < 1e-5 * scale
    assert 1e-4 * scale < (stale - exact).abs().max() < 0.2 * scale


def test_previews_arrive_for_every_step(client, path):
    seen = []
    client.sample(model(path), request(preview=True), on_progress=lambda *told: seen.append(told))
    assert [step for step, *_ in seen] == [0, 1, 2, 3]
    assert all(preview.shape == latent().shape for *_, preview in seen)
    assert seen[0][-1].abs().max() > 0


def test_a_cancel_stops_all_stages_and_the_next_run_is_whole(client, path):
    expected = client.sample(model(path), request())
    pids = client.status().pids
    told = []
    with pytest.raises(Cancelled):
        client.sample(
            model(path),
            request(40),
            on_progress=lambda step, *_: told.append(step),
            should_cancel=lambda: len(told) > 2,
        )
    assert len(told) < 39
    assert torch.equal(client.sample(model(path), request()), expected)
    assert client.status().pids == pids


def test_what_cannot_be_cut_is_refused_and_the_pool_lives(client, path):
    client.load(model(path))
    pids = client.status().pids
    with pytest.raises(ConfigurationError, match=r"warm up for 9 steps.*1 to 4"):
        client.sample(model(path, warmup_steps=9), request())
    with pytest.raises((ConfigurationError, RequestError), match=r"cannot be cut into 64 patches"):
        client.sample(model(path, patches=64), request())
    with pytest.raises(ConfigurationError, match="needs 3 devices"):
        client.load(model(path, pipe=3))
    assert torch.isfinite(client.sample(model(path), request())).all()
    assert client.status().pids == pids
