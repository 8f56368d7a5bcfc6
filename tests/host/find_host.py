"""Where ComfyUI is, which Python runs it, and what that Python lacks.

`python -m tests.host.find_host` fails where there is none, and says so.
"""

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
import importlib.metadata, re, sys
for line in open(sys.argv[1]):
    name = re.split(r"[=<>~!;#\\[ ]", line.strip())[0]
    if name and not name.startswith("torchaudio"):
        try:
            importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            print("missing", name)
import torch
if not torch.version.cuda and not torch.version.hip:
    try:
        import torchvision, torchaudio
    except Exception:
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


def find_gguf_pack(checkout: Path) -> Path | None:
    """The pack ComfyUI-GGUF: $COMFYUI_GGUF_PATH, else that of a ComfyUI, else ~/ComfyUI-GGUF; None: there is none."""
    given = os.environ.get("COMFYUI_GGUF_PATH")
    usual = [checkout / "custom_nodes" / "ComfyUI-GGUF", Path.home() / "ComfyUI-GGUF"]
    places = [Path(given).expanduser()] if given else usual
    return next((place.resolve() for place in places if (place / "loader.py").is_file()), None)


def find_host() -> Host:
    """The checkout and the Python that runs it.

    Raises:
        NoHost: none found, or its Python lacks what ComfyUI requires.
    """
    path = find_checkout()
    python = os.environ.get("COMFYUI_PYTHON") or sys.executable
    clean = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    probe = subprocess.run(
        [python, "-c", _PROBE, str(path / "requirements.txt")], env=clean, capture_output=True, text=True, timeout=600
    )
    found = probe.stdout.splitlines()
    missing = [line.removeprefix("missing ") for line in found if line.startswith("missing ")]
    if missing:
        raise NoHost(
            f"{python} lacks {len(missing)} packages of the ComfyUI in {path}, first {missing[0]}: "
            f"run `python -m tests.host.requirements`, or {HOW_TO}"
        )
    if probe.returncode:
        raise NoHost(f"{python} cannot run ComfyUI ({probe.stderr.strip().splitlines()[-1]}): {HOW_TO}")
    return Host(path, python, str(SHIM) if "shim" in found else "")


if __name__ == "__main__":
    try:
        find_checkout()
    except NoHost as missing:
        sys.exit(f"host tests will be skipped: {missing}")
