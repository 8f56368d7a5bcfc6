"""Python functions of ComfyUI's nodes as data: the name of their code, and the values that they were made with."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

CARRIED, PATCHES, REPLACED, OBJECTS, TOGETHER = "carried", "patches", "replaced", "objects", "together"
"""Entry of `transformer_options` that holds all of them, and what is in it: `PATCHES` by kind, `REPLACED` as
(kind, key, patch), `OBJECTS` by the name of their option, and whether every rank has to compute all rows."""
FUNCTIONS, SIGMAS = ("patches", "patches_replace"), "sigmas"
"""Options of ComfyUI's that hold functions, and one that calls with functions have and others have not."""


@dataclass(frozen=True)
class Attached:
    """A network beside the model, which is sent once and named by its number; `module` where it is at hand."""

    number: int
    module: Any = field(default=None, compare=False)


@dataclass(frozen=True)
class Patch:
    """A function, or an object that is called."""

    code: str  # "module:qualified name", one of those that the ranks know (networks/comfyui/node_rules.py)
    number: int  # the same number in one call is the same object; `values` stand with the first of them
    kept: int = 0  # of an object that remembers from step to step, its number in the life of ComfyUI's process; else 0
    since: int = 0  # objects with smaller numbers belong to runs that are over
    # Closure variables or attributes by name: numbers, tensors, `Attached`, other patches.
    values: Mapping[str, Any] = field(default_factory=dict)


def attached_in(value: Any) -> list[Attached]:
    """All networks that a value names, wherever inside."""
    if isinstance(value, Attached):
        return [value]
    if isinstance(value, Patch):
        return attached_in(value.values)
    items = value.values() if isinstance(value, Mapping) else value if isinstance(value, (list, tuple)) else ()
    return [each for item in items for each in attached_in(item)]
