"""Finds a ComfyUI checkout for the tests that need the host."""

from __future__ import annotations

import os
from pathlib import Path

HOW = "needs a ComfyUI checkout: set COMFYUI_PATH, or install this pack into one's custom_nodes"


def find_comfyui() -> Path | None:
    """$COMFYUI_PATH, the ComfyUI in whose custom_nodes the pack lies, or ~/ComfyUI; None where there is none."""
    named = os.environ.get("COMFYUI_PATH")
    pack = Path(__file__).resolve().parents[1]
    places = [Path(named)] if named else [pack.parents[1], Path.home() / "ComfyUI"]
    return next((place for place in places if (place / "comfy" / "sd.py").is_file()), None)
