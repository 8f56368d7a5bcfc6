"""Decoders of ComfyUI's VAEs as CUDA graphs, over several ranks: against the same launched kernel by kernel."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from parallel_runtime.acceleration.recordings import WARM_RUNS
from parallel_runtime.vae.families import can_be_recorded
from tests.comfyui_checkout import HOW, find_comfyui
from tests.ranks import run_ranks

COMFYUI = find_comfyui()
SIZES, CALLS = 2, 10


@pytest.mark.skipif(COMFYUI is None, reason=HOW)
def test_ranks_replay_what_they_recorded_of_each_size():
    args = {"comfyui": str(COMFYUI), "names": ["flux", "wan 2.1"]}
    for rank, found in enumerate(run_ranks(2, "tests.comfyui_vaes.ranks:record", args)):
        for told in found.values():
            assert told["differences"] == [0.0] * (CALLS if rank == 0 else 0)
            # Each size runs until it is recorded, then to warm up, and while it is recorded; replays are not counted.
            assert told["ran"] == SIZES * (WARM_RUNS + 2)


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_graphs_on_two_gpus_give_what_their_kernels_do():
    args = {"comfyui": str(COMFYUI), "names": ["kl", "flux", "flux2", "wan 2.1"], "real": True}
    found = run_ranks(2, "tests.comfyui_vaes.ranks:record", args, timeout=120, forked=False)[0]
    assert {told["known"] for told in found.values()} == {True}
    assert {told["ran"] for told in found.values()} == {SIZES * (WARM_RUNS + 2)}
    assert {name: told for name, told in found.items() if not max(told["differences"]) < 1e-2} == {}


def vae_with(module, name):
    """A VAE whose halves are of that class of ComfyUI's."""
    part = type(name, (nn.Module,), {"__module__": module})()
    return SimpleNamespace(encoder=part, decoder=part)


def test_what_is_recorded_was_seen_on_a_gpu(monkeypatch):
    gpu = torch.device("cuda", 0)
    wan = vae_with("comfy.ldm.wan.vae", "Decoder3d")
    assert can_be_recorded(wan, "decoder", gpu)
    assert not can_be_recorded(wan, "encoder", gpu)
    assert not can_be_recorded(wan, "decoder", torch.device("cpu"))
    assert not can_be_recorded(vae_with("comfy.ldm.genmo.vae.model", "Decoder"), "decoder", gpu)
    assert not can_be_recorded(vae_with("of.another", "Decoder"), "decoder", gpu)
    monkeypatch.setenv("PARALLEL_DIT_OFF", "recordings")
    assert not can_be_recorded(wan, "decoder", gpu)


@pytest.mark.skipif(COMFYUI is None, reason=HOW)
def test_an_engine_replays_while_memory_is_there_and_tries_once_what_cannot_be_recorded(tmp_path):
    given = {"comfyui": str(COMFYUI), "folder": str(tmp_path)}
    for told in run_ranks(2, "tests.comfyui_vaes.in_engine:decode", given):
        assert told["same"]
        assert told["found"] == {
            "nothing": [1, 4],
            "a replay": [0, 2],
            "what runs left was let go": [0, 0],
            "its weights were away": [1, 4],
            "what it takes is free no more": [0, 2],
            "and its recording was let go": [0, 0],
            "a recording fails": [1, 0],
            "that, and its weights were away": [1, 0],
        }
