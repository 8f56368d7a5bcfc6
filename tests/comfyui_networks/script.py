"""Runs a module as a script in a fork of a process that has imported ComfyUI: the import takes longer than most do."""

from __future__ import annotations

import contextlib
import io
import runpy
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from tests.ranks import run_ranks


def run_script(comfyui: str | Path, module: str, arguments: Iterable[object]) -> str:
    """What `python -m MODULE ARGUMENTS...` prints; whatever it exits with, it is a failure if it fails otherwise."""
    given = {"comfyui": str(comfyui), "module": module, "arguments": list(map(str, arguments))}
    (found,) = run_ranks(1, "tests.comfyui_networks.script:run", given)
    return str(found["printed"])


def run(rank: int, world_size: int, comfyui: str, module: str, arguments: list[str]) -> dict[str, Any]:
    """{"printed": to the standard output}."""
    printed = io.StringIO()
    sys.argv = [module, *arguments]
    with contextlib.redirect_stdout(printed), contextlib.suppress(SystemExit):
        runpy.run_module(module, run_name="__main__")
    return {"printed": printed.getvalue()}
