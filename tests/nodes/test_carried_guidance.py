"""Functions around guidance travel where all that they hold is data, and code that ranks have."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from nodes.carried_guidance import is_carried, read_guidance, read_guider
from nodes.transportable import loop_obstacles
from parallel_runtime.networks.comfyui.node_rules import CFG, SECOND_SCALE

SLG = "comfy_extras.nodes_slg:SkipLayerGuidanceDiT.execute.<locals>"
SETTINGS = {"double_layers": [7], "single_layers": [], "scale": 3.0, "sigma_start": 0.9, "sigma_end": 0.1}


def function(code: str, **values: Any):
    """One over these values, as a node makes it."""
    names = ", ".join(values)
    scope: dict[str, Any] = {}
    exec(f"def outer({names}):\n    def inner(args):\n        return [{names}]\n    return inner", scope)
    made = scope["outer"](**values)
    made.__module__, _, made.__qualname__ = code.partition(":")
    return made


def skipping(**changes: Any):
    skip = function(f"{SLG}.skip")
    return function(f"{SLG}.post_cfg_function", **{**SETTINGS, "model_sampling": object(), "skip": skip, **changes})


def of_class(code: str, **values: Any) -> Any:
    module, _, name = code.partition(":")
    return type(name, (SimpleNamespace,), {"__module__": module})(**values)


def test_numbers_and_known_code_travel_and_the_model_sampling_stays():
    (read,) = read_guidance({"sampler_post_cfg_function": [skipping()]}, of_class(CFG))
    assert read.values == {**SETTINGS, "skip": f"{SLG}.skip"}
    blocks = function("comfy_extras.nodes_lt:LTXVSpatioTemporalGuidance.execute.<locals>.post_cfg_function")
    assert is_carried([skipping(), blocks])


@pytest.mark.parametrize(
    "changed",
    [
        {"skip": function("another:pack")},
        {"skip": function(f"{SLG}.skip", inside=1)},
        {"scale": object()},
        {"double_layers": [object()]},
    ],
)
def test_what_is_no_data_does_not_travel(changed):
    assert is_carried(skipping())
    assert not is_carried([skipping(), skipping(**changed)])
    assert not is_carried(function("another.pack:post_cfg_function"))


def test_wrappers_around_a_guider_travel_behind_functions_and_others_are_obstacles():
    code = "comfy_extras.nodes_custom_sampler:CFGOverride.execute.<locals>.predict_noise_wrapper"
    override = function(code, cfg=1.0, sigma_hi=0.5, sigma_lo=0.0)

    def options(**around: Any) -> dict[str, Any]:
        wrappers = {"predict_noise": around}
        return {"sampler_post_cfg_function": [skipping()], "transformer_options": {"wrappers": wrappers}}

    read = read_guidance(options(a=[override], b=[override]), of_class(CFG))
    assert [each.place for each in read] == ["sampler_post_cfg_function", "predict_noise", "predict_noise"]
    assert read[1].values == {"cfg": 1.0, "sigma_hi": 0.5, "sigma_lo": 0.0}
    assert loop_obstacles(options(a=[override])) == []
    assert "(a)" in " ".join(loop_obstacles(options(a=[override, print])))
    assert "(easycache)" in " ".join(loop_obstacles(options(easycache=[print], a=[override])))


def test_a_scale_for_the_second_latent_takes_the_place_of_a_models_function():
    rescaled = function("comfy_extras.nodes_model_advanced:RescaleCFG.patch.<locals>.rescale_cfg", multiplier=0.7)
    guider = of_class(SECOND_SCALE, cfg=5.0, video_cfg=3.0, audio_cfg=5.0, _v_numel=12)
    (read,) = read_guidance({"sampler_cfg_function": rescaled}, guider)
    assert read.values == {"audio_cfg": 5.0, "v": 12, "video_cfg": 3.0}
    guider.audio_cfg = 3.0
    (read,) = read_guidance({"sampler_cfg_function": rescaled}, guider)
    assert read.values == {"multiplier": 0.7}
    assert read_guider(guider).code == CFG
