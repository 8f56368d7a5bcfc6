"""Scales that ComfyUI takes from what a layer is given, where ranks share out the tokens."""

from __future__ import annotations

import pytest

from tests.comfyui_checkout import HOW, find_comfyui
from tests.ranks import run_ranks

COMFYUI = find_comfyui()
pytestmark = pytest.mark.skipif(COMFYUI is None, reason=HOW)


@pytest.mark.slow
def test_ranks_scale_nvfp4_by_the_largest_value_of_all_tokens():
    first, last = run_ranks(2, "tests.comfyui_networks.agreed_scales:compare", {"comfyui": str(COMFYUI)})
    assert first == {"outside of blocks": True, "agreed": True, "alone": False, "behind": False, "chosen": False}
    assert last == {"outside of blocks": True, "agreed": True, "alone": True, "behind": True, "chosen": False}
