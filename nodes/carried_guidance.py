"""Guiders, and functions of core nodes around guidance (CFGNorm and others), as data for ranks. No ComfyUI needed."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

from parallel_runtime.networks.comfyui.module_tree import class_name
from parallel_runtime.networks.comfyui.node_rules import (
    AROUND_GUIDER,
    GUIDANCE_RULES,
    GUIDER_RULES,
    SECOND_SCALE,
    rule_of,
)
from parallel_runtime.requests.comfyui_code import Guidance, Guider, Scalar
from parallel_runtime.said import Said, said

from .carried_patches import closure_of

_ONE = "sampler_cfg_function"
PLACES = (
    _ONE, "sampler_calc_cond_batch_function", "sampler_pre_cfg_function", "sampler_post_cfg_function",
    "denoise_mask_function",
)  # fmt: skip
"""Entries of `model_options` that hold such functions, one or several."""
_OF_TWO_MODELS = "comfy_extras.nodes_custom_sampler:Guider_DualModel"


def guider_obstacle(code: str) -> Said | None:
    """Why ranks do not sample with a guider of this class ("module:Class"); None where they do."""
    if code in GUIDER_RULES:
        return None
    if code == _OF_TWO_MODELS:
        return said("a guider of two models, where a loop in the workers has one")
    return said("the guider {name}", name=code.rpartition(":")[2])


def is_carried(functions: Any) -> bool:
    """Whether all functions of an entry are made of numbers and of code that ranks have."""
    return all(_read("", each) is not None for each in _several(functions))


def read_guidance(model_options: Mapping[str, Any], guider: Any) -> tuple[Guidance, ...]:
    """The functions of a MODEL and of a guider, in the order in which they are called; for what `is_carried`."""
    given = [(place, each) for place in PLACES for each in _several(model_options.get(place, ()))]
    around = model_options.get("transformer_options", {}).get("wrappers", {}).get(AROUND_GUIDER, {})
    given += [(AROUND_GUIDER, each) for several in around.values() for each in several]
    found = [read for place, each in given if (read := _read(place, each)) is not None]
    begin = getattr(guider, "_v_numel", None)
    own_scale = class_name(type(guider)) == SECOND_SCALE and begin is not None
    if own_scale and not math.isclose(guider.video_cfg, guider.audio_cfg):
        values = {"audio_cfg": guider.audio_cfg, "v": begin, "video_cfg": guider.video_cfg}
        found = [each for each in found if each.place != _ONE]  # which it takes the place of
        found.insert(0, Guidance(_ONE, f"{SECOND_SCALE}.predict_noise.<locals>.dual_cfg", values))
    return tuple(found)


def read_guider(guider: Any) -> Guider:
    rule = GUIDER_RULES[class_name(type(guider))]
    return Guider(rule.code, {name: getattr(guider, name) for name in rule.values})


def _several(functions: Any) -> Iterator[Any]:
    yield from functions if isinstance(functions, (list, tuple)) else (functions,)


def _read(place: str, function: Any) -> Guidance | None:
    """None where it is made of more than numbers, or of code that ranks do not have."""
    code, held = class_name(function), closure_of(function)
    rule = rule_of(code, GUIDANCE_RULES)
    if rule is None:
        return None
    inside = {name: held.pop(name) for name in rule.functions if name in held}
    data = {name: value for name, value in held.items() if name not in (rule.sampling, rule.owner)}
    several = [value if isinstance(value, (list, frozenset)) else (value,) for value in data.values()]
    if any(rule_of(class_name(each)) is None or closure_of(each) for each in inside.values()):
        return None
    if not all(isinstance(each, Scalar) for values in several for each in values):
        return None
    carried = {name: data[name] for name in rule.values if name in data}
    carried |= {name: sorted(each) for name, each in carried.items() if isinstance(each, frozenset)}
    return Guidance(place, code, carried | {name: class_name(each) for name, each in inside.items()})
