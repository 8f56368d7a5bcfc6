"""ComfyUI's networks whose heads, or what these are made of, go through the host's memory."""

from __future__ import annotations

import pytest

from tests.ranks import run_ranks

from .test_compiled_networks import COMFYUI, with_comfyui

GATHERED = {
    "flux": 4,
    "flux2": 4,
    "chroma": 4,
    "qwen-image": 3,
    "z-image": 4,
    "hunyuan image": 4,
    "hunyuan video 1.5": 4,
}
"""Blocks whose inputs travel."""
GATHERED |= {"flux, float8": 4, "flux2, float8": 4, "qwen-image, float8": 3, "z-image, float8": 4}
GATHERED |= {"flux, scaled float8": 4, "qwen-image, scaled float8": 3}
GATHERED |= {"flux, int8": 4, "qwen-image, rotated int8": 3, "z-image, int8": 4, "hunyuan image, rotated int8": 4}
GATHERED |= {"flux2, rotated int8": 4, "chroma, int8": 4}
BYTES = {"float8": 1, "scaled float8": 1}
THREE_SCALES = {"qwen-image, scaled float8"}  # of queries, keys and values, so that three inputs go


@with_comfyui
def test_some_rows_of_a_quantised_layer_are_those_of_all():
    (found,) = run_ranks(1, "tests.comfyui_networks.quantised:compare_rows", {"comfyui": str(COMFYUI)})
    assert set(found) == {"float8", "scaled float8", "int8", "rotated int8", "sent int8", "sent rotated int8"}
    assert all(all(each.values()) for each in found.values()), found


@with_comfyui
@pytest.mark.parametrize(
    ("world_size", "names"),
    [
        (2, ["flux", "flux, float8"]),
        pytest.param(2, ["flux2", "chroma", "qwen-image", "z-image"], marks=pytest.mark.slow),
        pytest.param(2, ["flux2, float8", "qwen-image, float8", "z-image, float8"], marks=pytest.mark.slow),
        pytest.param(2, ["hunyuan image", "hunyuan video 1.5"], marks=pytest.mark.slow),
        pytest.param(2, ["flux, scaled float8", "qwen-image, scaled float8"], marks=pytest.mark.slow),
        pytest.param(2, ["flux, int8", "qwen-image, rotated int8"], marks=pytest.mark.slow),
        pytest.param(
            2,
            ["z-image, int8", "hunyuan image, rotated int8", "flux2, rotated int8", "chroma, int8"],
            marks=pytest.mark.slow,
        ),
        pytest.param(3, ["z-image", "z-image, float8", "z-image, int8"], marks=pytest.mark.slow),
    ],
)
def test_through_the_hosts_memory_go_heads_or_inputs(world_size, names):
    for found in run_ranks(
        world_size, "tests.comfyui_networks.compiled:through_host", {"comfyui": str(COMFYUI), "names": names}
    ):
        for name in names:
            assert max(found["differences"][name]) < (0.04 if "8" in name else 1e-5), found  # last bits round
            format = name.partition(", ")[2]
            kinds = ["int8", "float32"] if "int8" in format else ["float8_e4m3fn" if format else "float32"]
            assert found["gathered"][name] == [f"torch.{each}" for each in kinds for _ in range(GATHERED[name])], name
            assert found["sent"].get(name, 0.0) < 1e-5, "what goes in int8 is what layers would round"
            assert found["bytes"][name] == [BYTES.get(format, 4) * (3 if name in THREE_SCALES else 1)]
            assert found["noted"][name] == [True, True, True]
