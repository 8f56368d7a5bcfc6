"""What ComfyUI's memory management is told of a MODEL whose weights are the pool's: what is held, wherever it is."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from parallel_runtime.errors import PoolError
from tests.comfyui_checkout import HOW, find_comfyui, import_with_comfyui

COMFYUI = find_comfyui()
if COMFYUI is None:
    pytest.skip(HOW, allow_module_level=True)
pytestmark = [pytest.mark.host, pytest.mark.slow]

GPU = torch.device("cuda", 0)


class Remote:
    """As much of a RemoteTransformer as is asked."""

    def __init__(self, shared: bool):
        self.size_bytes, self.resident_bytes, self.released, self.shared, self.dead = 700, 0, 0, shared, False

    def shares(self, device: torch.device, current_index: int) -> bool:
        assert (device, current_index) == (GPU, 0)
        return self.shared

    def release(self) -> int:
        self.released += 1
        held, self.resident_bytes = self.resident_bytes, 0
        if self.dead:
            raise PoolError("It died.", "Queue again.")
        return held


@pytest.fixture(scope="module")
def comfy():
    """ComfyUI's memory management, and our patcher."""
    management, ours = import_with_comfyui("comfy.model_management", "nodes.remote_patcher")
    return SimpleNamespace(management=management, patcher=ours.RemoteModelPatcher)


@pytest.fixture
def made(comfy, monkeypatch):
    """Makes a patcher, on a GPU that the pool computes on, or not."""
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)

    def make(shared: bool):
        model = torch.nn.Module()
        model.parallel_remote = Remote(shared)
        return comfy.patcher(model, load_device=GPU, offload_device=torch.device("cpu")), model.parallel_remote

    return make


def test_what_is_needed_and_held_follows_the_pool(comfy, made):
    patcher, remote = made(shared=True)
    loaded = comfy.management.LoadedModel(patcher)
    assert (patcher.model_size(), loaded.model_loaded_memory()) == (700, 0)
    remote.resident_bytes = 650
    assert (patcher.model_size(), loaded.model_loaded_memory()) == (0, 650)
    remote.resident_bytes = 0  # the pool died, or another model took the place: the pool is asked, not remembered
    assert (patcher.model_size(), loaded.model_loaded_memory()) == (700, 0)
    remote.resident_bytes = 650
    assert patcher.partially_unload(torch.device("cpu"), 10) == 650
    assert (remote.released, patcher.model_size()) == (1, 700)


def test_a_pool_on_other_gpus_is_asked_for_nothing_but_when_all_is_unloaded(made):
    patcher, remote = made(shared=False)
    remote.resident_bytes = 650
    assert patcher.model_size() == 0
    assert patcher.partially_unload(torch.device("cpu"), 10) == 10
    assert (remote.released, remote.resident_bytes) == (0, 650)
    patcher.detach(unpatch_all=False)
    assert remote.released == 0
    patcher.detach()
    assert (remote.released, remote.resident_bytes) == (1, 0)


def test_an_unload_of_a_pool_that_died_is_no_error(made):
    patcher, remote = made(shared=True)
    remote.resident_bytes, remote.dead = 650, True
    assert patcher.partially_unload(torch.device("cpu"), 10) == 650
    assert patcher.loaded_size() == 0
