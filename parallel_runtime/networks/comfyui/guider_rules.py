"""The guiders of ComfyUI's nodes whose evaluations run in the ranks, and what travels of each. Data alone."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

CFG = "comfy.samplers:CFGGuider"


@dataclass(frozen=True)
class GuiderRule:
    """One guider.

    Args:
        values: attributes that travel.
        conds: names of its conditionings, in the order in which it has the model evaluate them.
        code: class whose `predict_noise` a rank runs.
    """

    values: tuple[str, ...]
    conds: tuple[str, ...]
    code: str


_PLAIN = GuiderRule(("cfg",), ("positive", "negative"), CFG)
_DUAL, _PERP = "comfy_extras.nodes_custom_sampler:Guider_DualCFG", "comfy_extras.nodes_perpneg:Guider_PerpNeg"
SECOND_SCALE = "comfy_extras.nodes_lt:Guider_LTXAVDualCFG"
"""It has another scale for the second of two latents in one, by a function around guidance."""

GUIDER_RULES: Mapping[str, GuiderRule] = {
    CFG: _PLAIN,
    "comfy_extras.nodes_custom_sampler:Guider_Basic": _PLAIN,
    SECOND_SCALE: _PLAIN,
    _DUAL: GuiderRule(("cfg1", "cfg2", "nested"), ("negative", "middle", "positive"), _DUAL),
    _PERP: GuiderRule(("cfg", "neg_scale"), ("positive", "negative", "empty_negative_prompt"), _PERP),
}
"""By "module:Class" of the guider."""


def guider_code(code: str) -> GuiderRule | None:
    """What is known of the code that a rank is asked to run; None for what is not to run there."""
    rule = GUIDER_RULES.get(code)
    return rule if rule is not None and rule.code == code else None
