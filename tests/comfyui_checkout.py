"""Finds a ComfyUI checkout for the tests that need the host."""

from __future__ import annotations

import os
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

HOW = "needs a ComfyUI checkout: set COMFYUI_PATH, or install this pack into one's custom_nodes"


def find_comfyui() -> Path | None:
    """$COMFYUI_PATH, the ComfyUI in whose custom_nodes the pack lies, or ~/ComfyUI; None where there is none."""
    named = os.environ.get("COMFYUI_PATH")
    pack = Path(__file__).resolve().parents[1]
    places = [Path(named)] if named else [pack.parents[1], Path.home() / "ComfyUI"]
    return next((place for place in places if (place / "comfy" / "sd.py").is_file()), None)


def import_with_comfyui(*names: str) -> list[Any]:
    """Modules of ComfyUI's, and of ours that need it, without a server and without a GPU."""
    path = str(find_comfyui())
    sys.path.append(path)  # at the end, and only meanwhile: it has a nodes.py that must not stand in for ours
    try:
        import_module("comfy.cli_args").args.cpu = True
        return [import_module(name) for name in names]
    finally:
        sys.path.remove(path)
