"""Which loader of a prompt a sampler's MODEL comes from. No ComfyUI needed."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import PurePath
from typing import Any

_FILE_INPUTS = {"ParallelLoader": "model_name", "ParallelCheckpointLoader": "ckpt_name"}


def find_loaders(get_node: Callable[[str], Mapping[str, Any] | None], start: str, file: str) -> list[str]:
    """Our loaders above a node that load this file: a result from the cache may be of a node that had another number.

    Args:
        get_node: a node of the prompt in ComfyUI's API form, by its number.
        start: where to begin.
        file: name of the model file.
    """
    found: list[str] = []
    seen: set[str] = set()
    waiting = [start]
    while waiting:
        name = waiting.pop()
        node = None if name in seen else get_node(name)
        seen.add(name)
        if node is None:
            continue
        inputs = node.get("inputs", {})
        chosen = inputs.get(_FILE_INPUTS.get(str(node.get("class_type")), ""))
        if isinstance(chosen, str) and PurePath(chosen).name == file:
            found.append(name)
        waiting += [str(value[0]) for value in inputs.values() if isinstance(value, (list, tuple)) and len(value) == 2]
    return found
