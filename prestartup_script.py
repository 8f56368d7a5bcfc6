"""ComfyUI runs this before it imports torch: the pool of the last session begins, and imports meanwhile."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from pathlib import Path

_NAME = "parallel_dit_early"
"""The pack, until ComfyUI imports it under a name of its own."""


def _start_early() -> None:
    pack = Path(__file__).resolve().parent
    spec = importlib.util.spec_from_file_location(_NAME, pack / "__init__.py", submodule_search_locations=[str(pack)])
    sys.modules[_NAME] = module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    if not hasattr(module, "NODE_CLASS_MAPPINGS"):  # it is not left out
        importlib.import_module(f"{_NAME}.nodes.start_setting").start_early()


if sys.platform == "linux":
    _start_early()
