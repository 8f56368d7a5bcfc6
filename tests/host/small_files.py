"""Small model files, made by ComfyUI's code, or by the package of its GGUF files, in a process of its own."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterable
from pathlib import Path

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
    module = "tests.comfyui_networks.write_files"
    command = [host.host.python, "-m", module, str(host.host.path), str(folder), *names]
    environment = {**os.environ, "PYTHONPATH": host.host.python_path}
    done = subprocess.run(
        command, cwd=PACK_ROOT, env=environment, capture_output=True, text=True, timeout=600, check=False
    )
    assert done.stdout, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


def write_gguf_files(host: ComfyHost) -> list[Path]:
    """Write the model of the tests as GGUF files, one of each type."""
    folder = host.base / "models" / "diffusion_models"
    script = PACK_ROOT / "tests" / "comfyui_networks" / "gguf_files.py"
    command = [host.host.python, str(script), "flux", str(folder / MODEL), str(folder), *GGUF_TYPES]
    subprocess.run(command, env={**os.environ, "PYTHONPATH": host.host.python_path}, timeout=600, check=True)
    return [folder / f"{name}.gguf" for name in GGUF_TYPES]
