"""U-Nets of ComfyUI's with channels side by side, against their own forward."""

from __future__ import annotations

import pytest

from tests.comfyui_checkout import HOW, find_comfyui
from tests.ranks import run_ranks

COMFYUI = find_comfyui()


@pytest.mark.skipif(COMFYUI is None, reason=HOW)
def test_a_unet_computes_the_same_and_where_nodes_act_or_comfyuis_bits_are_asked_for_it_runs_as_it_is():
    (found,) = run_ranks(1, "tests.comfyui_networks.side_by_side:compare", {"comfyui": str(COMFYUI)})
    assert found.pop("as it is") == []
    assert set(found) == {"convolutions", "products", "video"}
    for name, told in found.items():
        assert told["difference"] < 1e-5, name
        assert {"bias", "scale", "scale and SiLU"} <= set(told["kernels"]), name


@pytest.mark.skipif(COMFYUI is None, reason=HOW)
def test_a_unet_of_a_file_runs_so_unless_nothing_is_compiled(tmp_path):
    given = {"comfyui": str(COMFYUI), "path": str(tmp_path / "unet.safetensors")}
    (found,) = run_ranks(1, "tests.comfyui_networks.side_by_side:loaded", given)
    assert found == {"on": True, "off": False}
