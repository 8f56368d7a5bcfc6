"""Behind the panel: whose memory is taken, what diagnostics leave out, what settings ask for."""

from __future__ import annotations

import os
from types import SimpleNamespace

import pytest
import torch

from nodes.panel import settings
from nodes.panel.actions import ACTIONS
from nodes.panel.settings import default_config
from nodes.panel.status import _models, clean, read_gpus, share_out
from parallel_runtime.errors import ConfigurationError

GIB = 2**30


def test_memory_is_shared_out_by_process_where_the_driver_knows_them():
    gpu = share_out(40 * GIB, {7: 24 * GIB, 8: 1 * GIB, 1: 5 * GIB, 99: 9 * GIB}, {7, 8}, 1, (0, 0))
    assert gpu == {"pool": 25 * GIB, "comfyui": 5 * GIB, "others": 10 * GIB, "exact": True}


def test_in_a_container_pool_and_comfyui_say_what_they_know_of_and_nothing_is_counted_twice():
    gpu = share_out(30 * GIB, {4001: 29 * GIB}, {7, 8}, 1, (24 * GIB, 2 * GIB))
    assert gpu == {"pool": 24 * GIB, "comfyui": 2 * GIB, "others": 4 * GIB, "exact": False}
    less = share_out(20 * GIB, {}, {7}, 1, (24 * GIB, 2 * GIB))
    assert less["pool"] + less["comfyui"] + less["others"] == 20 * GIB


@pytest.mark.gpu
def test_what_this_process_takes_on_a_gpu_counts_as_comfyuis():
    before = read_gpus(set(), {})
    taken = torch.zeros(GIB, dtype=torch.uint8, device="cuda:0")
    after = read_gpus(set(), {})
    assert after[0]["comfyui"] - (before[0]["comfyui"] if before[0]["exact"] else 0) >= taken.nbytes
    assert after[0]["total"] > 0
    assert os.getpid()


def test_diagnostics_hold_neither_the_home_folder_nor_a_secret(monkeypatch):
    monkeypatch.setenv("HOME", "/home/ann")
    text = "/home/ann/models/a.safetensors PARALLEL_DIT_SECRET=abc123 HF_TOKEN: hf_xyz api-key=1 plain=2"
    cleaned = clean(text)
    assert cleaned == "~/models/a.safetensors PARALLEL_DIT_SECRET=*** HF_TOKEN: *** api-key=*** plain=2"


@pytest.mark.parametrize(
    ("text", "cleaned"),
    [
        ('{"api_key": "abc def"}', '{"api_key": "*** def"}'),
        ("Authorization: Bearer abcdefghij.k", "Authorization: Bearer ***"),
        ("proxy http://ann:hunter2@proxy:3128/", "proxy http://ann:***@proxy:3128/"),
        ("took hf_abcdefghijklmnopqrst from the environment", "took hf_*** from the environment"),
        ('{"tokens": 4096}, tokens 1 of 2, at 10:20:30', '{"tokens": 4096}, tokens 1 of 2, at 10:20:30'),
    ],
)
def test_a_secret_is_left_out_however_it_is_written_and_numbers_of_tokens_are_none(text, cleaned):
    assert clean(text) == cleaned


def test_settings_give_the_default_configuration_and_wrong_ones_are_told():
    assert default_config({}).devices == "auto"
    assert default_config({"ParallelDiT.DefaultDevices": " 0,1 "}).devices == "0,1"
    for wrong in ({"ParallelDiT.DefaultDevices": "gpu one"}, {"ParallelDiT.DefaultDevices": 7}):
        with pytest.raises(ConfigurationError, match="default in Settings, Parallel DiT"):
            default_config(wrong)


def test_a_default_that_cannot_hold_refuses_a_start_and_nothing_else(monkeypatch):
    monkeypatch.setattr(settings, "read_settings", lambda: {"ParallelDiT.DefaultDevices": "gpu one"})
    stopped: list[str] = []
    pool = SimpleNamespace(spec="cpu:2", stop=lambda: stopped.append("cpu:2"), models=[], vaes=[])
    monkeypatch.setattr("workers.client.pool_registry.known_pools", lambda: [pool])
    for action in ("stop", "park", "unload"):
        ACTIONS[action]({"pool": "cpu:2"})
    assert stopped == ["cpu:2"]
    with pytest.raises(ConfigurationError, match="default in Settings, Parallel DiT"):
        ACTIONS["start"]({})


def test_a_file_is_listed_once_whatever_its_configurations():
    def known(size: int, dtype: str = "bfloat16"):
        request = SimpleNamespace(path="/models/a.safetensors", dtype=dtype, held=size)
        loaded = SimpleNamespace(family="FLUX.1", bytes_per_rank=7, explanation="A plan.", details=None)
        return request, loaded

    models = [known(0), known(5), known(0), known(0, "float16")]
    listed = _models(SimpleNamespace(models=models, held_bytes=lambda model: model.held))  # type: ignore[arg-type]
    assert [(each["dtype"], each["state"]) for each in listed] == [("bfloat16", "resident"), ("float16", "parked")]
