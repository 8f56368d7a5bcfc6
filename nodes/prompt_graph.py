"""What a prompt's graph says: its links, nodes around a loader, how large the picture will be. No ComfyUI needed."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import PurePath
from typing import Any

Graph = Mapping[str, Mapping[str, Any]]
"""A prompt in ComfyUI's API form."""

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
        waiting += givers(node)
    return found


USUAL = (1024, 1024)
_LATENTS = ("latent_image", "latent")
_OF_VIDEOS = ("length", "frames")
_LEAST, _MOST = 512, 8192
"""Pixels of a side. Plans that hold for the usual size hold for these as well."""


def find_size(prompt: Graph | None, loader: str | None) -> tuple[int, int]:
    """(width, height) of the empty picture whose latent the nodes behind a loader are given; USUAL where there is none,
    where there are several, or where a video or another node makes it."""
    nodes = prompt or {}
    behind, waiting = set(), [loader]
    while waiting:
        start = waiting.pop()
        takers = [name for name, node in nodes.items() if start in givers(node) and name not in behind]
        behind.update(takers)
        waiting += takers
    sizes = set()
    for name in behind:
        for given in _LATENTS:
            start = giver(nodes[name].get("inputs", {}).get(given))
            if start is not None and start not in behind:
                sizes.add(_size(nodes.get(start, {}).get("inputs", {})))
    found = sizes.pop() if len(sizes) == 1 else None
    return found or USUAL


def giver(value: Any) -> str | None:
    """The node that a link comes from; None for a value."""
    return str(value[0]) if isinstance(value, (list, tuple)) and len(value) == 2 else None


def givers(node: Mapping[str, Any]) -> list[str]:
    """The nodes that a node's links come from."""
    return [start for value in node.get("inputs", {}).values() if (start := giver(value)) is not None]


def _size(inputs: Mapping[str, Any]) -> tuple[int, int] | None:
    width, height = inputs.get("width"), inputs.get("height")
    if any(name in inputs for name in _OF_VIDEOS) or type(width) is not int or type(height) is not int:
        return None
    return (width, height) if min(width, height) >= _LEAST and max(width, height) <= _MOST else None


def find_config(prompt: Graph | None, loader: str | None) -> str | None:
    """The node whose config a loader takes; None where there is none."""
    return giver((prompt or {}).get(loader or "", {}).get("inputs", {}).get("parallel_config"))
