"""Networks whose weights go from their file to the device at once have what ComfyUI's own loader gives them."""

from __future__ import annotations

import pytest

from tests.comfyui_checkout import HOW, find_comfyui
from tests.comfyui_networks.files import FILES
from tests.ranks import run_ranks

COMFYUI = find_comfyui()
pytestmark = pytest.mark.skipif(COMFYUI is None, reason=HOW)
FORMATS = (
    ("bfloat16", "bfloat16"),
    ("float32", "bfloat16"),
    ("bfloat16", "float8_e4m3fn"),
    ("+bfloat16", "bfloat16"),
    ("float8_e4m3fn", ""),
    ("scaled_fp8", ""),
    ("fp8", "float8_e4m3fn"),
    ("mxfp8", ""),
    ("nvfp4", ""),
    ("int8_tensorwise", ""),
    ("int8_rotated", ""),
)


def differences(folder, cases) -> dict[str, list[str]]:
    arguments = {"comfyui": str(COMFYUI), "folder": str(folder), "cases": cases}
    (found,) = run_ranks(1, "tests.comfyui_networks.loaded:compare", arguments)
    return found


@pytest.mark.slow
def test_every_format_is_loaded_as_comfyui_does(tmp_path):
    found = differences(tmp_path, [("flux", *each) for each in FORMATS])
    assert found == {case: [] for case in found}
    assert len(found) == len(FORMATS)


@pytest.mark.slow
def test_every_family_is_loaded_as_comfyui_does(tmp_path):
    found = differences(tmp_path, [(name, "float16", "bfloat16") for name in FILES])
    assert found == {case: [] for case in found}


def test_no_file_stays_mapped(tmp_path):
    arguments = {"comfyui": str(COMFYUI), "folder": str(tmp_path)}
    (found,) = run_ranks(1, "tests.comfyui_networks.loaded:mapped_afterwards", arguments)
    assert found["maps"] == []
