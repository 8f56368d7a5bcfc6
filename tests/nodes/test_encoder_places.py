"""What a canvas hears of text encoders from this ComfyUI: its GPU and its files, with GPUs that are none."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from nodes.panel import settings
from tests.comfyui_checkout import HOW, find_comfyui, import_with_comfyui

if find_comfyui() is None:
    pytest.skip(HOW, allow_module_level=True)
pytestmark = pytest.mark.host

GIB = 1 << 30
WISH = {"encoders": [["t5.safetensors", "flux"]], "models": ["flux.safetensors"]}


@pytest.fixture
def places(monkeypatch, tmp_path):
    """nodes.panel.encoder_gpu, with three GPUs of 24 GiB; the pool of loaders by default has 0 and 1."""
    management, folders, places = import_with_comfyui(
        "comfy.model_management", "folder_paths", "nodes.panel.encoder_gpu"
    )
    for folder, name, size in (("text_encoders", "t5", 9 * GIB), ("diffusion_models", "flux", 22 * GIB)):
        path = tmp_path / folder / f"{name}.safetensors"
        path.parent.mkdir()
        with path.open("wb") as file:
            file.truncate(size)
        monkeypatch.setitem(folders.folder_names_and_paths, folder, ([str(path.parent)], {".safetensors"}))
    gpus = [{"index": index, "total": 24 * GIB, "others": 0} for index in range(3)]
    monkeypatch.setattr(places, "read_status", lambda: {"gpus": gpus, "pools": []})
    monkeypatch.setattr(settings, "settings_file", lambda: tmp_path / "settings.json")
    (tmp_path / "settings.json").write_text('{"ParallelDiT.DefaultDevices": "0,1"}')
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    monkeypatch.setattr(management, "text_encoder_device", lambda: torch.device("cuda", 0))
    return places


def test_a_gpu_besides_the_pools_is_offered(places):
    offered: list[Any] = places.place_here(WISH)
    assert offered == [{"gpu": 2, "own": 0, "encoder": 9 * GIB, "model": 22 * GIB}]


def test_nothing_is_offered_where_encoders_are_on_the_cpu_or_devices_are_wrong(places, monkeypatch):
    with monkeypatch.context() as fewer:
        fewer.setattr(torch.cuda, "device_count", lambda: 1)  # the loader refuses them
        assert places.place_here(WISH) == []
    (management,) = import_with_comfyui("comfy.model_management")
    monkeypatch.setattr(management, "text_encoder_device", lambda: torch.device("cpu"))
    assert places.place_here(WISH) == []
