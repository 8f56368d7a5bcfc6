"""A template's node as a server takes it: its widgets' values by name, from what the server says of the node's type."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from .prompt_graph import Node

_WIDGETS = frozenset({"INT", "FLOAT", "STRING", "BOOLEAN", "COMBO", "COLOR"})
_DYNAMIC = "COMFY_DYNAMICCOMBO_V3"
_AFTER_GENERATE = frozenset({"fixed", "randomize", "increment", "decrement"})

Info = Mapping[str, Any]


def widget_values(node: Node, info: Info) -> dict[str, Any]:
    """Values of its widgets, each input that is not connected among them.

    Args:
        info: of its type, as /object_info has it.
    """
    if isinstance(node.saved, Mapping):
        values = dict(node.saved)
    else:
        values = {}
        left = list(node.saved)
        names = _widget_names(info["input"])
        chosen: Any = None
        while left:
            try:
                name = names.send(chosen)
            except StopIteration:
                break
            chosen = values[name] = left.pop(0)
            if name.rpartition(".")[2] in ("seed", "noise_seed") and left and left[0] in _AFTER_GENERATE:
                left.pop(0)
    return {**values, **node.promoted}


def limits(info: Info, name: str) -> tuple[float, float, float]:
    """(least, most, step) of a number's widget."""
    options = dict(_inputs(info["input"])).get(name.partition(".")[0], (None, {}))[1]
    return options.get("min", 0), options.get("max", 1 << 30), options.get("step", 1) or 1


def _inputs(groups: Mapping[str, Any]) -> Iterator[tuple[str, tuple[Any, dict[str, Any]]]]:
    for group in ("required", "optional"):
        for name, (kind, *more) in groups.get(group, {}).items():
            yield name, (kind, more[0] if more else {})


def _widget_names(groups: Mapping[str, Any], outer: str = "") -> Any:
    """Names in the order of widgets; is sent the value of each, which decides what follows a dynamic choice."""
    for name, (kind, options) in _inputs(groups):
        dynamic = kind == _DYNAMIC
        if options.get("forceInput") or not (isinstance(kind, list) or dynamic or kind in _WIDGETS):
            continue
        value = yield outer + name
        if dynamic:
            for option in options.get("options", ()):
                if option["key"] == value:
                    yield from _widget_names(option["inputs"], f"{outer}{name}.")
