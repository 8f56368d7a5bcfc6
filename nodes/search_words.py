"""Words by which the canvas finds a node, where this ComfyUI has a place for them."""

from __future__ import annotations

import inspect
from typing import Any

from comfy_api.latest import io

LOADER_WORDS = (
    "load diffusion", "multi gpu", "all gpus", "distributed", "parallel", "flux", "qwen", "wan", "z-image", "ltx",
    "sdxl",
)  # fmt: skip
"""By which artists look for what loads a model: what it is, how many GPUs it takes, whose model it is."""


def found_by(*words: str) -> dict[str, Any]:
    """An argument of io.Schema; none in a ComfyUI that does not know it (0.8)."""
    known = "search_aliases" in inspect.signature(io.Schema).parameters
    return {"search_aliases": list(words)} if known else {}
