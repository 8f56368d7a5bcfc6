"""`python -m tests.host.requirements`: gives this Python what ComfyUI needs, so that it can run the host tests.

Does nothing where $COMFYUI_PYTHON runs it. torch stays as it is, and torchaudio is left out: the host tests have a
stand-in for it. What tests/versions.txt names has the version that stands there.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path

from .find_host import find_checkout

VERSIONS = Path(__file__).resolve().parents[1] / "versions.txt"
_LEFT_OUT = {"torch", "torchaudio"}


def wanted(requirements: str, versions: str) -> str:
    """A requirements file without its lines for torch and torchaudio, and with those that a file of versions has."""
    chosen = {_name(line): line for line in versions.splitlines()}
    lines = (line for line in requirements.splitlines() if _name(line) not in _LEFT_OUT)
    return "\n".join(chosen.get(_name(line), line) for line in lines if _name(line))


def _name(line: str) -> str:
    """Of the package that a line of requirements is about; "" of others."""
    return re.split(r"[=<>~!;#\[ ]", line.strip())[0].lower()


def main() -> None:
    """Install."""
    if os.environ.get("COMFYUI_PYTHON"):
        return
    checkout = find_checkout()
    with tempfile.TemporaryDirectory() as folder:
        asked, held = Path(folder, "asked.txt"), Path(folder, "held.txt")
        asked.write_text(wanted((checkout / "requirements.txt").read_text(), VERSIONS.read_text()))
        held.write_text(f"torch=={version('torch')}\n")
        pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-compile"]
        subprocess.run([*pip, "-r", str(asked), "-c", str(held)], check=True)


if __name__ == "__main__":
    main()
