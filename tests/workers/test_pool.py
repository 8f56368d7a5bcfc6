"""The pool with a real (tiny) FLUX: persistent, warm, reused, and gone with its client."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
from dataclasses import replace

import psutil
import pytest
import torch

from benchmarks.load_transformer import load_transformer
from parallel_runtime.config import ParallelConfig
from parallel_runtime.errors import CheckpointError, ConfigurationError, RequestError
from parallel_runtime.loading.checkpoint import open_checkpoint
from parallel_runtime.networks.diffusers.flux import FLUX
from parallel_runtime.requests.control import Cancelled
from parallel_runtime.sampling.samplers import SUPPORTED
from tests.patience import wait_until
from tests.tiny_flux import weights_file, write_diffusers_folder
from tests.workers.loops import make_loop
from workers.client.client import PoolClient
from workers.client.node_requests import ModelRequest
from workers.launch import PACK_ROOT, PoolSpec

TWO = ParallelConfig(devices="cpu:2")
ONE = ParallelConfig(devices="cpu:1")


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return write_diffusers_folder(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(scope="module")
def client():
    client = PoolClient(PoolSpec("cpu", (0, 1)))
    yield client
    client.close()


@pytest.fixture
def model(path):
    return ModelRequest(str(path), "float32", TWO)


def conditioning(seed: int = 0, text: int = 7, batch: int = 1):
    generator = torch.Generator().manual_seed(seed)
    return {
        "context": torch.randn(batch, text, 64, generator=generator),
        "y": torch.randn(batch, 32, generator=generator),
        "guidance": torch.full((batch,), 3.5),
    }


def latent(batch: int = 1, height: int = 10, width: int = 12):
    return torch.randn(batch, 16, height, width, generator=torch.Generator().manual_seed(height * width))


def oracle(path, x, timestep, given):
    """One process, diffusers' class alone."""
    checkpoint = open_checkpoint(path)
    transformer = load_transformer(checkpoint, torch.float32, torch.device("cpu"))
    extras = {name: value for name, value in given.items() if name != "context"}
    arguments = FLUX.to_transformer(x, timestep, given["context"], checkpoint.config, **extras)
    with torch.no_grad():
        return FLUX.from_transformer(transformer(**arguments, return_dict=False)[0], x)


@pytest.mark.parametrize("batch", [1, 2, 3])
def test_a_forward_through_the_pool_is_the_transformers_own(client, model, path, batch):
    x, timestep, given = latent(batch), torch.linspace(0.3, 0.9, batch), conditioning(batch=batch)
    output = client.forward(model, x, timestep, given)
    expected = oracle(path, x, timestep, given)
    assert (output - expected).abs().max() < 1e-5 * expected.abs().max()


@pytest.mark.parametrize("sampler", SUPPORTED)
def test_two_ranks_sample_what_one_rank_samples_with_prompts_of_unequal_length(client, path, sampler):
    branches = {0: conditioning(1, 9), 1: conditioning(2, 4)}
    x = latent(2)
    inpaint = {"mask": (x > 0).float(), "latent_image": latent(2) * 0.5, "noise": latent(2)}
    request = make_loop(sampler, torch.tensor([0.9, 0.6, 0.2, 0.0]), x, branches, 3.0, inpaint=inpaint)
    two = client.sample(ModelRequest(str(path), "float32", TWO), request)
    one = client.sample(ModelRequest(str(path), "float32", ONE), request)
    assert (two - one).abs().max() < 1e-5 * one.abs().max()


def test_the_second_run_finds_the_same_processes_and_the_same_weights(client, model):
    client.load(model)
    before = client.status()
    assert client.load(model).reused
    client.forward(model, latent(), torch.tensor([0.5]), conditioning())
    after = client.status()
    assert before.pids == after.pids
    assert len(set(after.pids.values())) == 2
    assert after.state == "idle"


def test_another_model_and_another_configuration_keep_the_processes(client, model, path, tmp_path):
    client.load(model)
    pids = client.status().pids
    other = ModelRequest(str(write_diffusers_folder(tmp_path / "other", seed=1)), "float32", TWO)
    assert not client.load(other).reused
    assert client.load(replace(other, config=replace(TWO, attention="math"))).reused
    assert client.load(replace(other, config=replace(TWO, ulysses=1))).reused
    assert client.load(model).reused
    assert client.status().pids == pids


def test_a_replaced_file_is_loaded_again(client, tmp_path):
    model = ModelRequest(str(write_diffusers_folder(tmp_path / "m", seed=1)), "float32", TWO)
    client.load(model)
    first = client.forward(model, latent(), torch.tensor([0.5]), conditioning())
    weights_file(tmp_path / "m").unlink()
    write_diffusers_folder(tmp_path / "m", seed=2)
    assert not client.load(model).reused
    assert not torch.allclose(first, client.forward(model, latent(), torch.tensor([0.5]), conditioning()))


def test_a_file_that_is_cut_off_under_the_ranks_costs_nothing(client, tmp_path):
    model = ModelRequest(str(write_diffusers_folder(tmp_path / "m", seed=1)), "float32", TWO)
    client.load(model)
    first = client.forward(model, latent(), torch.tensor([0.5]), conditioning())
    with open(weights_file(tmp_path / "m"), "r+b") as file:
        file.truncate(1 << 20)
    assert torch.equal(client.forward(model, latent(), torch.tensor([0.5]), conditioning()), first)
    with pytest.raises(CheckpointError, match="truncated"):
        client.load(model)


def test_released_memory_comes_back_and_the_next_call_loads_by_itself(client, model, path):
    info = client.load(model)
    assert client.release(model) == info.bytes_per_rank > 0
    assert client.release(model) == 0
    output = client.forward(model, latent(), torch.tensor([0.5]), conditioning())
    assert torch.isfinite(output).all()


def test_cancel_stops_at_the_next_step_and_leaves_the_weights_warm(client, model):
    client.load(model)
    seen = []
    request = make_loop("euler", torch.linspace(1, 0, 201), latent(1, 32, 32), {0: conditioning()}, 1.0)
    with pytest.raises(Cancelled):
        client.sample(
            model,
            request,
            on_progress=lambda step, total, _: seen.append(step),
            should_cancel=lambda: len(seen) >= 3,
        )
    assert 3 <= len(seen) < 190
    assert client.load(model).reused
    short = make_loop("euler", torch.linspace(1, 0, 4), request.x, request.branches, 1.0, preview=True)
    previews = []
    client.sample(
        model, short, on_progress=lambda step, total, denoised: previews.append((step, total, denoised.shape))
    )
    assert previews == [(step, 3, (1, 16, 32, 32)) for step in range(3)]


@pytest.mark.parametrize(
    ("change", "error", "says"),
    [
        ({"path": "/nowhere/flux.safetensors"}, CheckpointError, "/nowhere/flux.safetensors does not exist"),
        ({"config": replace(TWO, ulysses=4)}, ConfigurationError, "needs 4 devices"),
    ],
)
def test_a_wrong_load_is_one_readable_error_and_the_pool_lives(client, model, change, error, says):
    client.load(model)
    pids = client.status().pids
    with pytest.raises(error, match=says):
        client.load(replace(model, **change))
    client.forward(model, latent(), torch.tensor([0.5]), conditioning())
    assert client.status().pids == pids


@pytest.mark.slow
def test_heads_that_do_not_divide_run_on_all_ranks_and_an_idle_rank_keeps_step(path):
    client = PoolClient(PoolSpec("cpu", (0, 1, 2)))
    try:
        three = ModelRequest(str(path), "float32", ParallelConfig(devices="cpu:3", ulysses=3))
        two = replace(three, config=ParallelConfig(devices="cpu:3", ulysses=2, ring=1))
        x, timestep = latent(), torch.tensor([0.5])
        expected = oracle(path, x, timestep, conditioning())
        for model, says in ((three, "up to 2 of 4 heads each"), (two, "1 of 3 devices is not used")):
            assert says in client.load(model).explanation
            assert torch.allclose(client.forward(model, x, timestep, conditioning()), expected, atol=1e-5)
        request = make_loop("dpmpp_2m", torch.linspace(1, 0, 4), x, {0: conditioning()}, 1.0)
        assert torch.isfinite(client.sample(two, request)).all()
    finally:
        client.close()


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({**conditioning(), "context": torch.randn(1, 7, 99)}, "width 64 in this checkpoint, but got 99"),
        ({**conditioning(), "clip_fea": torch.zeros(1, 3)}, "does not take clip_fea"),
        (conditioning(batch=3), "3 items, but the latent batch holds 2"),
    ],
)
def test_a_wrong_request_costs_nothing(client, model, given, says):
    client.load(model)
    pids = client.status().pids
    with pytest.raises(RequestError, match=says):
        client.forward(model, latent(2), torch.tensor([0.5, 0.5]), given)
    assert client.load(model).reused
    assert client.status().pids == pids


def test_what_a_refused_request_would_have_sent_is_sent_by_the_next_one(client, model):
    text, x = conditioning(seed=61), latent(height=4)
    not_carried = {**conditioning(seed=62), "y": [lambda: None]}
    loop = make_loop("euler", torch.linspace(1, 0, 3), x, {0: text, 1: not_carried}, 2.0)
    with pytest.raises(RequestError, match="'y' is or holds a function"):
        client.sample(model, loop)
    with pytest.raises(RequestError, match=r"is empty: its shape is \(0, 16, 4, 12\)"):
        client.forward(model, latent(batch=0, height=4), torch.zeros(0), text)
    with pytest.raises(RequestError, match="is empty"):
        client.sample(model, make_loop("euler", torch.linspace(1, 0, 3), x[:0], {0: text}, 1.0))
    assert client.sample(model, make_loop("euler", torch.linspace(1, 0, 3), x, {0: text}, 1.0)).isfinite().all()
    assert client.forward(model, x, torch.tensor([0.5]), text).isfinite().all()


@pytest.mark.long  # and in the middle of a step in CI: test_pool_lifetime.py
def test_the_pool_ends_with_a_client_that_is_killed(path):
    script = textwrap.dedent(f"""
        from parallel_runtime.config import ParallelConfig
        from workers.client.node_requests import ModelRequest
        from workers.client.pool_registry import get_pool
        config = ParallelConfig(devices="cpu:2")
        pool = get_pool(config)
        pool.load(ModelRequest({str(path)!r}, "float32", config))
        status = pool.status()
        print(*status.pids.values(), pool.pool.pid, pool.pool.directory, flush=True)
        import time
        time.sleep(600)
    """)
    client = subprocess.Popen([sys.executable, "-c", script], cwd=PACK_ROOT, stdout=subprocess.PIPE, text=True)
    assert client.stdout is not None
    *pids, directory = client.stdout.readline().split()
    processes = [psutil.Process(int(pid)) for pid in pids]
    os.kill(client.pid, signal.SIGKILL)
    client.wait()
    wait_until(lambda: not any(alive(process) for process in processes))
    assert [process.pid for process in processes if alive(process)] == []
    assert wait_until(lambda: not os.path.exists(directory))


def alive(process: psutil.Process) -> bool:
    return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
