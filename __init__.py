"""Parallel DiT: ComfyUI's entry into the pack."""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import logging
import re
import sys
from pathlib import Path

WEB_DIRECTORY = "./web"

_PACK_ROOT = Path(__file__).resolve().parent
_FLOOR = "0.8.0"
"""The oldest ComfyUI that this has been run with."""


def _register_package(name: str) -> None:
    """Make a folder of the pack importable under its own name, as it is in the ranks and in scripts.

    `sys.path` stays as it is: the pack's `nodes` folder would hide ComfyUI's module of that name.

    Raises:
        ImportError: another pack has taken the name.
    """
    folder = _PACK_ROOT / name
    taken = sys.modules.get(name)
    if taken is not None:
        places = [Path(place).resolve() for place in getattr(taken, "__path__", ())]
        if folder in places:
            return
        where = places[0] if places else getattr(taken, "__file__", "a built-in module")
        raise ImportError(
            f"Parallel DiT needs the Python package name {name!r}, which {where} has taken already. "
            "Disable the custom node pack that lies there, or Parallel DiT."
        )
    spec = importlib.util.spec_from_file_location(
        name, folder / "__init__.py", submodule_search_locations=[str(folder)]
    )
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)


def _why_left_out() -> str:
    """What this machine or ComfyUI lacks, and what to do, in sentences; "" where the pack runs."""
    if sys.platform != "linux":
        return (
            f"Parallel DiT runs on Linux, and this is {sys.platform}: its nodes are left out. "
            "On Windows, ComfyUI under WSL2 is a Linux (docs/slow-links.md)."
        )
    try:
        found: str = importlib.import_module("comfyui_version").__version__
    except ImportError:
        return ""
    numbers, floor = ([int(number) for number in re.findall(r"\d+", version)[:3]] for version in (found, _FLOOR))
    if numbers >= floor:
        return ""
    return f"Parallel DiT needs ComfyUI {_FLOOR} or newer, and this is {found}: its nodes are left out. Update ComfyUI."


if _why := _why_left_out():
    logging.getLogger(__name__).error(_why)
    NODE_CLASS_MAPPINGS: dict[str, type] = {}  # which ComfyUI asks for before the entry point
else:
    for _name in ("parallel_runtime", "workers"):
        _register_package(_name)


def comfy_entrypoint():
    """Return the pack's ComfyExtension; ComfyUI calls it once at its start."""
    with contextlib.ExitStack() as failed:
        # Without nodes nobody uses a pool that has begun.
        failed.callback(importlib.import_module("workers.client.supervisor_process").take_early, None)
        # First: where a newer ComfyUI changed something, the next import may be what fails for it.
        for note in importlib.import_module("parallel_runtime.comfyui_contracts").host_notes():
            logging.getLogger(__name__).warning("Parallel DiT: %s", note)
        extension = importlib.import_module(".nodes.extension", __name__).ParallelExtension()
        failed.pop_all()
    return extension
