"""What ComfyUI's memory management is told of a MODEL whose weights are the pool's: what is held, wherever it is."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch

from parallel_runtime.errors import PoolError
from parallel_runtime.requests.control import Cancelled
from tests.comfyui_checkout import HOW, find_comfyui, import_with_comfyui

COMFYUI = find_comfyui()
if COMFYUI is None:
    pytest.skip(HOW, allow_module_level=True)
pytestmark = [pytest.mark.host, pytest.mark.slow]

GPU, OTHER = torch.device("cuda", 0), torch.device("cuda", 1)
GIB = 1 << 30


class Remote:
    """As much of a RemoteTransformer as is asked; `gpus` are those of its pool."""

    def __init__(self, shared: bool, gpus: tuple[torch.device, ...] | None = None):
        self.gpus = gpus if gpus is not None else (GPU,) * shared
        self.size_bytes, self.resident_bytes, self.dead = 700, 0, False
        self.parked, self.dropped, self.asked = 0, 0, 0

    def shares(self, device: torch.device) -> bool:
        return device in self.gpus

    def release(self, park: bool, should_cancel: Callable[[], bool]) -> int:
        if self.dead:
            raise PoolError("It died.", "Queue again.")
        if should_cancel():
            raise Cancelled
        self.parked += park
        self.dropped += not park
        held, self.resident_bytes = self.resident_bytes, 0
        return held


class Own(torch.nn.Module):
    """A network of ComfyUI's own, of so many bytes."""

    def __init__(self, size: int):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(size, dtype=torch.uint8), requires_grad=False)
        self.device = torch.device("cpu")


@pytest.fixture(scope="module")
def comfy():
    """ComfyUI's memory management, and our patcher."""
    management, patching, extension, ours, patchers = import_with_comfyui(
        "comfy.model_management",
        "comfy.model_patcher",
        "comfy.patcher_extension",
        "nodes.remote_patcher",
        "nodes.pool_patchers",
    )
    return SimpleNamespace(
        management=management,
        own=patching.ModelPatcher,
        on_load=extension.CallbacksMP.ON_LOAD,
        patcher=ours.RemoteModelPatcher,
        patchers=patchers,
    )


@pytest.fixture
def gpu(comfy, monkeypatch):
    """ComfyUI's memory management on a GPU of which `gpu.free` bytes are free, and nothing loaded yet."""
    gpu = SimpleNamespace(free=4 * GIB)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    management = comfy.management
    monkeypatch.setattr(management, "get_free_memory", lambda device=None, torch_free_too=False: (
        (gpu.free, 0) if torch_free_too else gpu.free
    ))  # fmt: skip
    monkeypatch.setattr(management, "vram_state", management.VRAMState.NORMAL_VRAM)
    monkeypatch.setattr(management, "get_all_torch_devices", lambda exclude_current=False: [GPU], raising=False)
    monkeypatch.setattr(management, "get_torch_device", lambda: GPU)
    monkeypatch.setattr(management, "current_loaded_models", [])
    monkeypatch.setattr(comfy.patchers, "_KEPT", [])
    return gpu


@pytest.fixture
def made(comfy, gpu):
    """Makes a patcher, on a GPU that the pool computes on, or not; or with a pool on some GPUs."""

    def make(shared: bool, *gpus: torch.device):
        model = torch.nn.Module()
        model.parallel_remote = Remote(shared, gpus or None)
        model.parallel_shapes = SimpleNamespace(take=lambda model, patches: None)
        model.parallel_patches = SimpleNamespace(read=lambda patcher: None)
        patcher = comfy.patcher(model, load_device=GPU, offload_device=torch.device("cpu"))
        patcher.parallel_loads = 0

        def count(*_):
            patcher.parallel_loads += 1

        patcher.add_callback(comfy.on_load, count)
        return patcher, model.parallel_remote

    return make


def test_what_is_needed_follows_the_pool(comfy, made):
    patcher, remote = made(shared=True)
    assert patcher.model_size() == 700
    remote.resident_bytes = 650
    assert patcher.model_size() == 0
    remote.resident_bytes = 0  # the pool died, or another model took the place: the pool is asked, not remembered
    assert patcher.model_size() == 700


@pytest.mark.parametrize("shared", [True, False])
def test_a_run_begins_with_the_model_in_place_however_little_is_free(comfy, gpu, made, shared):
    patcher, remote = made(shared)
    comfy.management.load_models_gpu([patcher])
    for free in (4 * GIB, GIB, GIB // 100, 0):
        remote.resident_bytes, gpu.free = 650, free
        before = patcher.parallel_loads
        comfy.management.load_models_gpu([patcher], memory_required=2 * GIB)
        assert (remote.resident_bytes, remote.parked, remote.dropped) == (650, 0, 0), free
        assert patcher.parallel_loads == before + 1, free  # it asks the pool for the patches of this run


@pytest.mark.parametrize("missing", [100, 651, 200 * GIB])
def test_memory_that_another_model_misses_is_made_by_parking_and_never_on_other_gpus(comfy, gpu, made, missing):
    shared, here = made(shared=True)
    other, there = made(shared=False)
    comfy.management.load_models_gpu([shared, other])
    here.resident_bytes = there.resident_bytes = 650
    gpu.free = 0
    comfy.management.free_memory(missing, GPU)
    assert (here.parked, here.dropped, here.resident_bytes) == (1, 0, 0)
    comfy.management.free_memory(missing, GPU)  # it is not there to be parked again, nor forgotten where it lies
    assert (here.parked, here.dropped) == (1, 0)
    assert (there.parked, there.dropped, there.resident_bytes) == (0, 0, 650)
    assert shared.model_size() == 700  # what its next run needs


def keep_own(comfy, gpu, device: torch.device) -> tuple[list[bool], object]:
    """A network of ComfyUI's own on a GPU, by which 1000 bytes become free where it goes: what it was told, and it."""
    own = comfy.own(Own(1000), load_device=device, offload_device=torch.device("cpu"))
    detached: list[bool] = []
    own.detach = lambda unpatch_all=True: (detached.append(unpatch_all), setattr(gpu, "free", 1000))
    loaded = comfy.management.LoadedModel(own)
    loaded.real_model, loaded.model_finalizer = (lambda: own.model), weakref.finalize(own.model, lambda: None)
    comfy.management.current_loaded_models.append(loaded)
    return detached, own


def test_comfyuis_own_models_go_before_a_pool(comfy, gpu, made):
    shared, here = made(shared=True)
    comfy.management.load_models_gpu([shared])
    detached, _own = keep_own(comfy, gpu, GPU)
    here.resident_bytes, gpu.free = 650, 0
    comfy.management.free_memory(900, GPU)
    assert (detached, here.parked, here.dropped) == ([True], 0, 0)


@pytest.fixture
def two_gpus(comfy, gpu, monkeypatch):
    """As `gpu`, in a machine of two, of which each has as much free."""
    both = [GPU, OTHER]
    monkeypatch.setattr(comfy.management, "get_all_torch_devices", lambda exclude_current=False: both, raising=False)
    return gpu


def test_a_text_encoder_on_another_gpu_of_the_pool_makes_room_there_when_the_model_loads_or_runs(comfy, two_gpus, made):
    patcher, remote = made(True, GPU, OTHER)
    assert patcher.devices == [GPU, OTHER]
    for ask in (lambda: patcher.make_room(700), lambda: comfy.management.load_models_gpu([patcher.clone()])):
        comfy.management.current_loaded_models.clear()
        detached, _own = keep_own(comfy, two_gpus, OTHER)
        two_gpus.free = 0
        ask()
        assert detached == [True]
    remote.resident_bytes = 650
    for free in (0, GIB // 100, GIB):
        two_gpus.free = free
        comfy.management.load_models_gpu([patcher], memory_required=2 * GIB)
        assert (remote.resident_bytes, remote.parked, remote.dropped) == (650, 0, 0), free


def test_a_text_encoder_gets_the_pools_memory_on_another_gpu_and_everything_goes_once(comfy, two_gpus, made):
    patcher, remote = made(True, GPU, OTHER)
    elsewhere, there = made(True, OTHER)
    assert elsewhere.devices == [OTHER]
    comfy.management.load_models_gpu([patcher, elsewhere])
    comfy.management.load_models_gpu([patcher.clone(), elsewhere])
    for each in (remote, there):
        each.resident_bytes = 650
    two_gpus.free = 0
    comfy.management.free_memory(100, OTHER)
    assert [(each.parked, each.dropped, each.resident_bytes) for each in (remote, there)] == [(1, 0, 0)] * 2
    for each in (remote, there):
        each.resident_bytes = 650
    comfy.management.free_memory(100, GPU)
    assert (remote.parked, there.parked) == (2, 1), "what is on the other GPU alone stays"
    comfy.management.unload_all_models()
    assert [each.dropped for each in (remote, there)] == [1, 1]
    assert comfy.management.current_loaded_models == []


def test_what_unloads_everything_drops_models_wherever_they_are(comfy, made):
    shared, here = made(shared=True)
    other, there = made(shared=False)
    comfy.management.load_models_gpu([shared, other])
    here.resident_bytes = there.resident_bytes = 650
    other.detach(unpatch_all=False)
    assert there.dropped == 0
    comfy.management.unload_all_models()
    assert (here.parked, here.dropped, here.resident_bytes) == (0, 1, 0)
    assert (there.parked, there.dropped, there.resident_bytes) == (0, 1, 0)


def test_an_unload_of_a_pool_that_died_or_that_is_not_waited_for_is_no_error(comfy, made, monkeypatch):
    patcher, remote = made(shared=True)
    remote.resident_bytes, remote.dead = 650, True
    assert patcher.partially_unload(torch.device("cpu"), 10) == 10
    remote.dead = False
    monkeypatch.setattr(comfy.management, "interrupt_processing", True)
    patcher.detach()  # between prompts, where nothing catches an interrupt
    assert remote.dropped == 0
    monkeypatch.undo()
    patcher.detach()
    assert remote.dropped == 1
