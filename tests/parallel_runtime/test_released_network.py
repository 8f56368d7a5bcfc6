"""ComfyUI's own network on a rank that was asked to let it go: no layer of it is left, whoever may have known it."""

import pytest

from tests.comfyui_checkout import HOW, find_comfyui
from tests.ranks import run_ranks

COMFYUI = find_comfyui()


@pytest.mark.skipif(COMFYUI is None, reason=HOW)
@pytest.mark.parametrize("weights", ["whole", "host"])
def test_no_layer_of_a_released_network_is_alive(weights, tmp_path):
    arguments = {"comfyui": str(COMFYUI), "folder": str(tmp_path), "weights": weights}
    (found,) = run_ranks(1, "tests.comfyui_networks.released:layers_with_weights", arguments)
    assert sum(found["while it is loaded"].values()) > 20
    assert found["after its release"] == found["after another release"] == {}
