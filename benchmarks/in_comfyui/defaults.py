"""Inputs that a graph leaves out, as this ComfyUI and this version of the pack have them by default."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .graphs import Graph


def fill(graph: Graph, infos: Mapping[str, Mapping[str, Any]], compile: str) -> Graph:
    """Give required inputs that are missing the defaults of this ComfyUI and this version of the pack.

    Args:
        infos: node kind -> what /object_info says of it.
        compile: "on", "off", or "default", which is on where the choice is only between these two.

    Raises:
        ValueError: a kind is not there.
    """
    filled = {}
    for name, content in graph.items():
        kind, given = content["class_type"], content["inputs"]
        if kind not in infos:
            raise ValueError(f"this ComfyUI has no node {kind}")
        inputs = {**_defaults(infos[kind]), **given}
        if kind == "ParallelConfig" and "compile" not in given:
            inputs["compile"] = _compile(infos[kind], compile)
        filled[name] = {"class_type": kind, "inputs": inputs}
    return filled


def _defaults(info: Mapping[str, Any]) -> dict[str, Any]:
    found = {}
    for name, (kind, *more) in info["input"].get("required", {}).items():
        details = more[0] if more else {}
        choices = kind if isinstance(kind, list) else details.get("options")
        if "default" in details:
            found[name] = details["default"]
        elif choices:
            found[name] = choices[0]
    return found


def _compile(info: Mapping[str, Any], wish: str) -> Any:
    inputs = {**info["input"].get("required", {}), **info["input"].get("optional", {})}
    kind, details = inputs["compile"]
    if kind == "BOOLEAN":
        return wish != "off"
    return details["default"] if wish == "default" else wish
