"""What a prompt's graph says of how large the picture will be. No ComfyUI needed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

Graph = Mapping[str, Mapping[str, Any]]  # a prompt in ComfyUI's API form

USUAL = (1024, 1024)
_LATENTS = ("latent_image", "latent")
_OF_VIDEOS = ("length", "frames")
_LEAST, _MOST = 512, 8192  # pixels of a side. Plans that hold for the usual size hold for these as well.


def find_size(prompt: Graph | None, loader: str | None) -> tuple[int, int]:
    """(width, height) of the one empty picture whose latent the nodes behind a loader are given; USUAL otherwise."""
    nodes = prompt or {}
    behind, waiting = set(), [] if loader is None else [loader]
    while waiting:
        start = waiting.pop()
        givers = {name: map(_giver, node.get("inputs", {}).values()) for name, node in nodes.items()}
        takers = [name for name, given in givers.items() if start in given and name not in behind]
        behind.update(takers)
        waiting += takers
    sizes = set()
    for name in behind:
        for given in _LATENTS:
            giver = _giver(nodes[name].get("inputs", {}).get(given))
            if giver is not None and giver not in behind:
                sizes.add(_size(nodes.get(giver, {}).get("inputs", {})))
    found = sizes.pop() if len(sizes) == 1 else None
    return found or USUAL


def _giver(value: Any) -> str | None:
    """The node that a link comes from; None for a value."""
    return str(value[0]) if isinstance(value, (list, tuple)) and len(value) == 2 else None


def _size(inputs: Mapping[str, Any]) -> tuple[int, int] | None:
    width, height = inputs.get("width"), inputs.get("height")
    if any(name in inputs for name in _OF_VIDEOS) or type(width) is not int or type(height) is not int:
        return None
    return (width, height) if min(width, height) >= _LEAST and max(width, height) <= _MOST else None
