"""What the client refuses before the pool hears of it, and what it does not hand on as a success."""

from __future__ import annotations

import math

import pytest
import torch

from parallel_runtime.config import ParallelConfig
from parallel_runtime.errors import CheckpointError, RequestError
from parallel_runtime.loading.files import identity
from parallel_runtime.requests.requests import Finished
from parallel_runtime.sampling.denoiser import check_guidance
from tests.workers.loops import make_loop
from workers.client.client import PoolClient
from workers.client.node_requests import ModelRequest, Reply, require_finite
from workers.launch import PoolSpec


@pytest.mark.parametrize("change", ["content", "inode", "gone"])
def test_a_file_that_was_replaced_is_not_loaded_for_a_model_of_the_old_one(tmp_path, change):
    path = tmp_path / "m.safetensors"
    path.write_text("one")
    model = ModelRequest(str(path), "bfloat16", ParallelConfig(devices="cpu:1"), identity(path))
    model.check_files()
    if change == "content":
        path.write_text("other")
    else:
        path.unlink()
    if change == "inode":
        (tmp_path / "in between").write_text("takes the old inode")
        path.write_text("one")
    client = PoolClient(PoolSpec("cpu", (0,)), "tests.workers.no_such_module")
    with pytest.raises(CheckpointError, match="was replaced after|does not exist"):
        client.load(model)
    assert client.status() is None


@pytest.mark.parametrize(
    ("cfg", "sigma", "latent"),
    [(math.nan, 1.0, 0.0), (math.inf, 1.0, 0.0), (1.0, math.nan, 0.0), (1.0, 1.0, math.inf)],
)
def test_a_loop_over_no_number_is_refused(cfg, sigma, latent):
    request = make_loop("euler", torch.tensor([sigma, 0.0]), torch.full((1, 4), latent), {}, cfg)
    client = PoolClient(PoolSpec("cpu", (0,)), "tests.workers.no_such_module")
    wrong = "there is a value that is no number" if math.isfinite(latent) else "input latent"
    with pytest.raises(RequestError, match=wrong):
        client.sample(ModelRequest("m", "bfloat16", ParallelConfig()), request)
    if not math.isfinite(cfg):
        with pytest.raises(RequestError, match="which is no number"):
            check_guidance(1, cfg)


def test_a_latent_of_no_numbers_is_no_success():
    tensors = {"latent": torch.zeros(1, 4, 8)}
    assert require_finite(Reply(Finished(), tensors), "The latent") is tensors
    with pytest.raises(RequestError, match="The latent came out with values that are no numbers.*weight_dtype"):
        require_finite(Reply(Finished(), tensors, finite=False), "The latent")
