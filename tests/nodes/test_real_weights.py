"""What reads weights of a MODEL whose network is in the pool, or runs layers of it, gets what ComfyUI's own gives."""

from __future__ import annotations

import pytest

from tests.comfyui_checkout import HOW, find_comfyui
from tests.ranks import run_ranks

COMFYUI = find_comfyui()


@pytest.mark.slow
@pytest.mark.skipif(COMFYUI is None, reason=HOW)
def test_controlnets_of_the_models_weights_get_those_of_the_file():
    (found,) = run_ranks(1, "tests.comfyui_networks.control_weights:agree", {"comfyui": str(COMFYUI)})
    assert found == {"Qwen-Image Fun": 0.0, "SD3.5": 0.0}
