"""Guidance of a loop by ComfyUI's own code: functions of its nodes, made again, where it looks for them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from ...errors import RequestError
from ...requests.requests import Guidance
from ...said import said
from .live_patches import build
from .patch_rules import guidance_rule_of

_ONE = "sampler_cfg_function"
_SEVERAL = ("sampler_pre_cfg_function", "sampler_post_cfg_function")


def make_guidance(functions: Sequence[Guidance], cfg: float, second_cfg: tuple[int, float] | None) -> dict[str, Any]:
    """Entries of ComfyUI's `model_options`.

    Args:
        cfg, second_cfg: the guidance scale, and that of another latent in the same one with where it begins.

    Raises:
        RequestError: a function that this ComfyUI does not have, or that no rank may run.
    """
    made: dict[str, Any] = {}
    for each in functions:
        rule = guidance_rule_of(each.code)
        if rule is None or each.place not in (_ONE, *_SEVERAL):
            raise RequestError(said("The pool was sent {code}, which no rank may run.", code=each.code), "Report this.")
        function = build(each.code, rule, {name: each.values.get(name) for name in rule.values})
        made[each.place] = function if each.place == _ONE else [*made.get(each.place, ()), function]
    if second_cfg is not None:
        made[_ONE] = _with_second(cfg, *second_cfg)
    return made


def _with_second(cfg: float, begin: int, other: float) -> Callable[[Mapping[str, Any]], torch.Tensor]:
    """What LTXV Dual CFG Guider does, whose module imports all of ComfyUI's nodes."""

    def guide(args: Mapping[str, Any]) -> torch.Tensor:
        cond, uncond = args["cond"], args["uncond"]
        out: torch.Tensor = uncond + (cond - uncond) * cfg
        out[..., begin:] = uncond[..., begin:] + (cond[..., begin:] - uncond[..., begin:]) * other
        return out

    return guide
