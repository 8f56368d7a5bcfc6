"""Functions of core nodes around guidance (CFGNorm and the like) as data for the ranks. No ComfyUI needed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from parallel_runtime.networks.comfyui.module_tree import class_name
from parallel_runtime.networks.comfyui.patch_rules import guidance_rule_of
from parallel_runtime.requests.requests import Guidance

PLACES = ("sampler_cfg_function", "sampler_pre_cfg_function", "sampler_post_cfg_function")
"""Entries of `model_options` that hold such functions, one or several."""
_SCALARS = (bool, int, float, str, type(None))


def is_carried(functions: Any) -> bool:
    """Whether all functions of an entry are made of numbers and of code that ranks have."""
    return all(
        guidance_rule_of(class_name(each)) is not None
        and all(isinstance(value, _SCALARS) for value in _values(each).values())
        for each in _several(functions)
    )


def read_guidance(model_options: Mapping[str, Any]) -> tuple[Guidance, ...]:
    """The functions of a MODEL, in the order in which they are called; for what `is_carried`."""
    return tuple(
        Guidance(place, class_name(each), _values(each))
        for place in PLACES
        for each in _several(model_options.get(place, ()))
    )


def _several(functions: Any) -> Iterator[Any]:
    yield from functions if isinstance(functions, (list, tuple)) else (functions,)


def _values(function: Any) -> dict[str, Any]:
    code = getattr(function, "__code__", None)
    cells = getattr(function, "__closure__", None) or ()
    return {} if code is None else {n: c.cell_contents for n, c in zip(code.co_freevars, cells, strict=True)}
