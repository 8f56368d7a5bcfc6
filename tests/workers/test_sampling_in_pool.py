"""Loops in the pool that are more than a plain flow: other predictions, fixed channels, batches over the data axis."""

from __future__ import annotations

import pytest
import torch

from benchmarks.load_transformer import load_transformer
from parallel_runtime.config import ParallelConfig
from parallel_runtime.errors import RequestError
from parallel_runtime.loading.checkpoint import open_checkpoint
from parallel_runtime.networks.diffusers.flux import FLUX
from parallel_runtime.requests.requests import concat_name
from parallel_runtime.sampling.denoiser import PREDICTIONS, Denoiser
from parallel_runtime.sampling.samplers import SAMPLERS, run_steps
from tests.tiny_flux import tiny_config, write_diffusers_folder
from tests.workers.loops import make_loop
from workers.client.client import PoolClient
from workers.client.node_requests import LoopRequest, ModelRequest
from workers.launch import PoolSpec

SIGMAS = torch.tensor([14.6, 5.0, 1.2, 0.3, 0.0])
TIMESTEPS = torch.tensor([0.999, 0.8, 0.41, 0.1, 0.0])
"""Of this family's size; those of others are another matter of the client's."""


@pytest.fixture(scope="module")
def client():
    client = PoolClient(PoolSpec("cpu", (0, 1)))
    yield client
    client.close()


def gaussian(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def branches(batch: int) -> dict[int, dict[str, torch.Tensor]]:
    """Positive and negative, of unequal length."""
    return {
        index: {
            "context": gaussian(batch, length, 64, seed=index),
            "y": gaussian(batch, 32, seed=index + 9),
            "guidance": torch.full((batch,), 3.5),
        }
        for index, length in enumerate((9, 4))
    }


def oracle(path, request: LoopRequest) -> torch.Tensor:
    """The same loop in this process, with diffusers' class."""
    checkpoint = open_checkpoint(path)
    transformer = load_transformer(checkpoint, torch.float32, torch.device("cpu"))

    def predict(x, timestep):
        outputs = []
        for index, conditioning in request.branches.items():
            extras = dict(conditioning)
            fixed = request.tensors.get(concat_name(index))
            seen = x if fixed is None else torch.cat([x, fixed], dim=1)
            context = extras.pop("context")
            arguments = FLUX.to_transformer(seen, timestep, context, checkpoint.config, **extras)
            outputs.append(FLUX.from_transformer(transformer(**arguments, return_dict=False)[0], seen))
        return outputs

    return run_steps(
        SAMPLERS[request.job.sampler],
        Denoiser(predict, PREDICTIONS[request.job.prediction], request.tensors["timesteps"], request.job.cfg),
        request.x,
        request.tensors["sigmas"],
        lambda evaluation, denoised: None,
    )


def sampled(client, path, request: LoopRequest, **degrees: int) -> torch.Tensor:
    return client.sample(ModelRequest(str(path), "float32", ParallelConfig(devices="cpu:2", **degrees)), request)


def assert_same(ours: torch.Tensor, wanted: torch.Tensor) -> None:
    assert wanted.std() > 0.05
    assert (ours - wanted).abs().max() < 1e-5 * wanted.abs().max()


@pytest.mark.long_but_for("dpmpp_2m-v_prediction")
@pytest.mark.slow  # in one process in the first tier: test_sampling_against_comfyui.py, and in a pool test_pool.py
@pytest.mark.parametrize(("sampler", "prediction"), [("euler", "eps"), ("dpmpp_2m", "v_prediction")])
def test_diffusion_models_sample_over_two_ranks_as_in_one_process(client, tmp_path, sampler, prediction):
    path = write_diffusers_folder(tmp_path / "tiny")
    x = gaussian(1, 16, 10, 12) * 14.6
    request = make_loop(sampler, SIGMAS, x, branches(1), 3.0, prediction=prediction, timesteps=TIMESTEPS)
    assert_same(sampled(client, path, request), oracle(path, request))


@pytest.mark.slow  # without processes in the first tier: test_input_checks.py
def test_fixed_channels_of_each_branch_reach_the_transformer_at_every_step(client, tmp_path):
    path = write_diffusers_folder(tmp_path / "canny", config=tiny_config(in_channels=128))
    sigmas = torch.tensor([1.0, 0.7, 0.3, 0.0])
    fixed = (gaussian(2, 16, 10, 12, seed=3), gaussian(2, 16, 10, 12, seed=4))
    x = gaussian(2, 16, 10, 12)
    request = make_loop("dpmpp_2m", sigmas, x, branches(2), 3.0, concat=fixed, timesteps=sigmas)
    assert_same(sampled(client, path, request), oracle(path, request))


@pytest.mark.long_but_for("3.0")
@pytest.mark.slow
@pytest.mark.parametrize("cfg", [1.0, 3.0])
def test_a_batch_over_the_data_axis_keeps_each_picture(client, tmp_path, cfg):
    path = write_diffusers_folder(tmp_path / "tiny")
    sigmas = torch.tensor([1.0, 0.7, 0.3, 0.0])
    both = branches(2)
    chosen = both if cfg != 1 else {0: both[0]}
    request = make_loop("dpmpp_2m", sigmas, gaussian(2, 16, 10, 12), chosen, cfg, timesteps=sigmas)
    assert_same(sampled(client, path, request, data=2, ulysses=1), oracle(path, request))


@pytest.mark.slow
def test_a_prediction_that_the_pool_does_not_know_is_refused(client, tmp_path):
    path = write_diffusers_folder(tmp_path / "tiny")
    request = make_loop("euler", SIGMAS, gaussian(1, 16, 10, 12), branches(1), 3.0, prediction="edm")
    with pytest.raises(RequestError, match="'edm'"):
        sampled(client, path, request)
