"""On a GPU: weights that come block by block, between two ranks that share it, as one GPU suffices to try it."""

from __future__ import annotations

import pytest

from tests.ranks import run_ranks
from tests.tiny_flux import tiny_config, write_diffusers_folder

CONFIG = tiny_config(num_layers=2, num_single_layers=3, num_attention_heads=2)
DEVICES = [pytest.param("cpu", marks=pytest.mark.long), pytest.param("cuda:0", marks=pytest.mark.gpu)]


@pytest.mark.parametrize("device", DEVICES)
def test_ranks_of_one_gpu_get_blocks_from_each_other_and_from_the_host(device, tmp_path):
    path = write_diffusers_folder(tmp_path / "model", CONFIG, seed=1)
    arguments = {"path": str(path), "folder": str(tmp_path), "device": device}
    target = "tests.parallel_runtime.gpu_streamed_run:compare"
    for found in run_ranks(2, target, arguments, timeout=300, forked=device == "cpu"):
        recordings = {name: found.pop(name) for name in list(found) if name.endswith("recorded")}
        assert set(recordings.values()) == {int(device != "cpu")}
        assert found.pop("on the device") == (device != "cpu")
        assert all(found.values()), [name for name, right in found.items() if not right]
