"""Where ComfyUI is, which Python runs it, and what that Python lacks."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

PACK_ROOT = Path(__file__).resolve().parents[2]
SHIM = Path(__file__).resolve().parent / "cpu_shim"
HOW_TO = "set COMFYUI_PATH to a ComfyUI checkout, and COMFYUI_PYTHON to its Python if that is another one than this"

_PROBE = """
import torch, importlib, sys
if torch.version.cuda or torch.version.hip:
    sys.exit()
try:
    import torchvision, torchaudio
except Exception as error:
    print("shim")
"""


class NoHost(Exception):
    """There is no ComfyUI to test with; the message says how to give one."""


@dataclass(frozen=True)
class Host:
    """A ComfyUI that can be started. `python_path` is what its PYTHONPATH must hold."""

    path: Path
    python: str
    python_path: str


def find_checkout() -> Path:
    """ComfyUI's folder: $COMFYUI_PATH, else the one the pack is installed in, else ~/ComfyUI.

    Raises:
        NoHost: none of them is one.
    """
    given = os.environ.get("COMFYUI_PATH")
    if given:
        places = [Path(given).expanduser()]
    else:
        # The pack may be linked into custom_nodes: the path as it was typed knows that, the resolved one does not.
        here = [Path(os.environ.get("PWD", ".")), PACK_ROOT]
        places = [place.parent.parent for place in here if place.parent.name == "custom_nodes"]
        places.append(Path.home() / "ComfyUI")
    for place in places:
        if (place / "main.py").is_file() and (place / "comfy").is_dir():
            return place
    raise NoHost(f"no ComfyUI in {', '.join(map(str, places))}: {HOW_TO}")


def find_host() -> Host:
    """The checkout and the Python that runs it.

    Raises:
        NoHost: none found, or its Python has no torch.
    """
    path = find_checkout()
    python = os.environ.get("COMFYUI_PYTHON") or sys.executable
    clean = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    probe = subprocess.run([python, "-c", _PROBE], env=clean, capture_output=True, text=True, timeout=120)
    if probe.returncode:
        reason = probe.stderr.strip().splitlines()[-1]
        raise NoHost(f"{python} cannot run ComfyUI ({reason}): {HOW_TO}")
    return Host(path, python, str(SHIM) if probe.stdout.strip() == "shim" else "")
