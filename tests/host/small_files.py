"""Small model files, made by ComfyUI's code, or by the package of its GGUF files, in a process of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

from tests.comfyui_networks.script import run_script

from .comfy_host import ComfyHost
from .find_host import PACK_ROOT
from .workflow import MODEL

GGUF_TYPES = ("Q8_0", "Q4_0", "F16", "BF16")


def write_small_files(host: ComfyHost, folder: Path, names: Iterable[str]) -> dict[str, str]:
    """Write FOLDER/NAME.safetensors for each that this ComfyUI recognises and builds.

    Returns:
        What it says to the others, by name; one of them is a failure, unless this ComfyUI is older
        (`older_host.skip_as_older`).
    """
    return json.loads(run_beside(host, "write_files", host.host.path, folder, *names).splitlines()[-1])


def run_beside(host: ComfyHost, name: str, *arguments: object) -> str:
    """What a script of tests/comfyui_networks prints that imports this ComfyUI, by the Python that runs it."""
    module = f"tests.comfyui_networks.{name}"
    if host.host.python == sys.executable:
        return run_script(host.host.path, module, arguments)
    command = [host.host.python, "-m", module, *map(str, arguments)]
    environment = {**os.environ, "PYTHONPATH": host.host.python_path}
    done = subprocess.run(
        command, cwd=PACK_ROOT, env=environment, capture_output=True, text=True, timeout=600, check=False
    )
    assert done.stdout, done.stderr[-3000:]
    return done.stdout


def write_gguf_files(host: ComfyHost) -> list[Path]:
    """Write the model of the tests as GGUF files, one of each type."""
    folder = host.base / "models" / "diffusion_models"
    script = PACK_ROOT / "tests" / "comfyui_networks" / "gguf_files.py"
    command = [host.host.python, str(script), "flux", str(folder / MODEL), str(folder), *GGUF_TYPES]
    subprocess.run(command, env={**os.environ, "PYTHONPATH": host.host.python_path}, timeout=600, check=True)
    return [folder / f"{name}.gguf" for name in GGUF_TYPES]
