"""Guidance of a loop by ComfyUI's own code: functions of its nodes, made again, where it looks for them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ...errors import RequestError
from ...requests.patches import Patch
from ...requests.requests import Guidance
from ...said import said
from .live_patches import build
from .patch_rules import guidance_rule_of, rule_of

_ONE = ("sampler_cfg_function", "sampler_calc_cond_batch_function", "denoise_mask_function")
_SEVERAL = ("sampler_pre_cfg_function", "sampler_post_cfg_function")


def make_guidance(functions: Sequence[Guidance], sampling: Any) -> dict[str, Any]:
    """Entries of ComfyUI's `model_options`.

    What a function has the network do inside stays data there, as it comes with a conditioning.

    Args:
        sampling: ComfyUI's model sampling.

    Raises:
        RequestError: a function that this ComfyUI does not have, or that no rank may run.
    """
    made: dict[str, Any] = {}
    for each in functions:
        rule = guidance_rule_of(each.code)
        inside = {} if rule is None else {name: str(each.values.get(name)) for name in rule.functions}
        if rule is None or each.place not in (*_ONE, *_SEVERAL) or not all(map(rule_of, inside.values())):
            raise RequestError(
                said("The workers were sent {code}, which no worker may run.", code=each.code), "Report this."
            )
        values: dict[str, Any] = {name: each.values.get(name) for name in rule.values}
        values |= {name: Patch(code, number) for number, (name, code) in enumerate(inside.items())}
        if rule.sampling:
            values[rule.sampling] = sampling
        function = build(each.code, rule, values)
        made[each.place] = function if each.place in _ONE else [*made.get(each.place, ()), function]
    return made
