"""What a prompt's graph says around a loader: its nodes, and how large the picture will be. No ComfyUI needed."""

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


USUAL = (1024, 1024)
_LATENTS = ("latent_image", "latent")
_OF_VIDEOS = ("length", "frames")
_LEAST, _MOST = 512, 8192
"""Pixels of a side. Plans that hold for the usual size hold for these as well."""


def find_size(prompt: Mapping[str, Any] | None, loader: str | None) -> tuple[int, int]:
    """(width, height) of the empty picture whose latent the nodes behind a loader are given; USUAL where there is none,
    where there are several, or where a video or another node makes it.

    Args:
        prompt: the graph in ComfyUI's API form.
    """
    nodes = prompt or {}
    behind, waiting = set(), [loader]
    while waiting:
        start = waiting.pop()
        takers = [name for name, node in nodes.items() if start in _givers(node) and name not in behind]
        behind.update(takers)
        waiting += takers
    sizes = set()
    for name in behind:
        for given in _LATENTS:
            link = nodes[name].get("inputs", {}).get(given)
            if isinstance(link, (list, tuple)) and len(link) == 2 and str(link[0]) not in behind:
                sizes.add(_size(nodes.get(str(link[0]), {}).get("inputs", {})))
    found = sizes.pop() if len(sizes) == 1 else None
    return found or USUAL


def _givers(node: Mapping[str, Any]) -> set[str]:
    links = node.get("inputs", {}).values()
    return {str(link[0]) for link in links if isinstance(link, (list, tuple)) and len(link) == 2}


def _size(inputs: Mapping[str, Any]) -> tuple[int, int] | None:
    width, height = inputs.get("width"), inputs.get("height")
    if any(name in inputs for name in _OF_VIDEOS) or type(width) is not int or type(height) is not int:
        return None
    return (width, height) if min(width, height) >= _LEAST and max(width, height) <= _MOST else None


def find_config(prompt: Mapping[str, Any] | None, loader: str | None) -> str | None:
    """The node whose config a loader takes; None where there is none.

    Args:
        prompt: the graph in ComfyUI's API form.
    """
    node = (prompt or {}).get(loader or "", {})
    link = node.get("inputs", {}).get("parallel_config")
    return str(link[0]) if isinstance(link, (list, tuple)) and link else None
