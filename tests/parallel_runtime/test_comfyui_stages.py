"""Stages of ComfyUI's own networks against the emulator of PipeFusion's schedule."""

from __future__ import annotations

from typing import Any

import pytest

from tests.comfyui_checkout import HOW, find_comfyui
from tests.parallel_runtime.test_pipefusion import case, emulated, relative_error
from tests.ranks import run_ranks

COMFYUI = find_comfyui()
pytestmark = pytest.mark.skipif(COMFYUI is None, reason=HOW)
CASES = {
    2: [
        case("two stages", pipe=2),
        case("patches that do not divide", pipe=2, patches=4, latent=(14, 5)),
        case("batch of two", pipe=2, batch=2),
        case("cfg on one pipeline", pipe=2, texts=[5, 3]),
        case("warm-up of two", pipe=2, patches=3, warmup=2),
        case("synchronous only", pipe=2, warmup=4),
        case("one patch", pipe=2, patches=1),
        case("multistep", pipe=2, sampler="dpmpp_2m", patches=3),
        case("with previews", pipe=2, patches=3, preview=True),
    ],
    3: [case("three stages", pipe=3, patches=3), case("fewer patches than stages", pipe=3, patches=2, texts=[5, 3])],
    4: [
        case("with cfg", pipe=2, cfg=2, texts=[5, 3], patches=3),
        case("stages that share out tokens", pipe=2, ulysses=2, texts=[5, 3], patches=3),
        case("in a ring, of patches that do not divide", pipe=2, ring=2, patches=4, latent=(14, 5)),
    ],
}

FAMILIES = [
    "flux", "flux2", "chroma", "qwen-image", "qwen-image layered", "mage-flow", "z-image", "lumina 2", "sd3.5 large",
    "sd3.5 medium", "auraflow", "joyimage", "pixart", "hunyuan video", "hunyuan video 1.5", "hunyuan image", "wan t2v",
    "wan i2v", "wan camera", "wan s2v", "humo", "z-image omni", "hunyuandit",
]  # fmt: skip


DEEP = ["flux", "flux2", "chroma", "z-image", "auraflow", "hunyuan video", "hunyuandit"]
"""Those that have blocks for three stages."""


@pytest.mark.long_but_for("3-3")
@pytest.mark.slow
@pytest.mark.parametrize(("world_size", "stages"), [(2, 2), (3, 3), (4, 2)])
def test_every_patch_has_the_whole_forwards_rows(world_size: int, stages: int) -> None:
    """Where keys and values are kept of the same latent; stages behind the first see nothing of it."""
    names = DEEP if world_size == 3 else FAMILIES
    arguments = {"comfyui": str(COMFYUI), "names": names, "stages": stages, "dtype": "float32"}
    found = run_ranks(world_size, "tests.comfyui_networks.staged:run_tiny", arguments)[-1]
    assert all(len(found[name]) == 4 and max(found[name]) < 1e-5 for name in names), found


@pytest.mark.slow
def test_tokens_keep_their_type_from_stage_to_stage() -> None:
    names = ["flux", "qwen-image", "z-image", "sd3.5 medium", "hunyuan video", "wan t2v"]
    arguments = {"comfyui": str(COMFYUI), "names": names, "stages": 2, "dtype": "bfloat16"}
    found = run_ranks(2, "tests.comfyui_networks.staged:run_tiny", arguments)[-1]
    assert all(max(found[name]) < 1e-2 for name in names), found


@pytest.mark.long_but_for("3")
@pytest.mark.slow
@pytest.mark.parametrize("world_size", CASES)
def test_stages_of_comfyuis_flux_equal_the_emulated_schedule(world_size: int, monkeypatch: Any) -> None:
    arguments = {"comfyui": str(COMFYUI), "cases": CASES[world_size]}
    found = run_ranks(world_size, "tests.comfyui_networks.staged:run_flux", arguments)[0]
    for each in CASES[world_size]:
        assert relative_error(found[each["name"]], emulated(each, monkeypatch)) < 1e-5, each
