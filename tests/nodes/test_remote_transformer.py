"""The transformer that is elsewhere: checks before it sends, remembers what is loaded, records when it is asked to."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from nodes.remote_transformer import RemoteTransformer
from nodes.transformer_call import TransformerCall
from parallel_runtime.config import ParallelConfig
from parallel_runtime.errors import RequestError
from workers.client import ModelRequest, SampleRequest, never


class DoublingPool:
    """Stands in for PoolClient: the prediction is twice the latent."""

    def __init__(self):
        self.requests = []

    def load(self, model, should_cancel):
        self.requests.append("load")
        return SimpleNamespace(bytes_per_rank=100)

    def forward(self, model, x, timestep, conditioning, should_cancel):
        self.requests.append("forward")
        return 2 * x.float()

    def sample(self, model, request, on_progress, should_cancel):
        self.requests.append("sample")
        return 2 * request.x

    def release(self, model):
        self.requests.append("release")
        return 100


def make_remote(devices: str = "cpu:2") -> tuple[RemoteTransformer, DoublingPool]:
    pool = DoublingPool()
    model = ModelRequest("model.safetensors", "bfloat16", ParallelConfig(devices=devices))
    return RemoteTransformer(model, connect=lambda config: pool), pool


def make_call(x: torch.Tensor, control=None, **options) -> TransformerCall:
    return TransformerCall(x, torch.ones(len(x)), {"context": torch.ones(1, 2, 3)}, control, options)


def test_a_prediction_comes_back_in_the_type_of_the_latent():
    remote, _ = make_remote()
    x = torch.randn(2, 4, 6, 8, dtype=torch.bfloat16)
    output = remote.forward(make_call(x), never)
    assert output.dtype == torch.bfloat16
    assert torch.equal(output, 2 * x)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_numbers_that_are_not_finite_are_refused_before_they_are_sent(bad):
    remote, pool = make_remote()
    x = torch.zeros(1, 4, 2, 2)
    x[0, 1, 0, 1] = bad
    with pytest.raises(RequestError, match="input latent"):
        remote.forward(make_call(x), never)
    request = SampleRequest("euler", torch.ones(2), x, (), 1.0, 0)
    with pytest.raises(RequestError, match="input latent"):
        remote.sample(request, lambda *step: None, never)
    assert pool.requests == []


def test_a_controlnet_or_a_patch_is_refused_by_name():
    remote, pool = make_remote()
    with pytest.raises(RequestError, match=r"patches inside.*ControlNet.*comes later"):
        remote.forward(make_call(torch.zeros(1, 4, 2, 2), control={"input": []}, patches={"a": [1]}), never)
    assert pool.requests == []


def test_capture_records_calls_and_sends_nothing():
    remote, pool = make_remote()
    call = make_call(torch.ones(2, 8, 6, 4))
    with remote.capture(channels=4) as calls:
        output = remote.forward(call, never)
    assert calls == [call]
    assert output.shape == (2, 4, 6, 4)
    assert not output.any()
    assert pool.requests == []
    remote.forward(call, never)
    assert pool.requests == ["forward"]


def test_it_knows_what_the_pool_holds():
    remote, pool = make_remote()
    assert remote.release() == 0
    remote.load(never)
    assert (remote.size_bytes, remote.resident_bytes) == (100, 100)
    assert remote.release() == 100
    assert (remote.size_bytes, remote.resident_bytes) == (100, 0)
    remote.forward(make_call(torch.zeros(1, 4, 2, 2)), never)  # the pool has loaded it again
    assert remote.resident_bytes == 100
    assert pool.requests == ["load", "release", "forward"]


@pytest.mark.parametrize(
    ("devices", "device", "shared"),
    [
        ("auto", "cuda:1", True),
        ("0,2", "cuda:2", True),
        ("0,2", "cuda:1", False),
        ("1,2", "cuda", True),  # the current device is 1
        ("0,2", "cuda", False),
        ("cpu:2", "cuda:0", False),
        ("auto", "cpu", False),
    ],
)
def test_it_knows_whether_the_pool_competes_for_comfyuis_memory(devices, device, shared):
    remote, _ = make_remote(devices)
    assert remote.shares(torch.device(device), current_index=1) is shared
