"""`python -m tests.host.requirements`: gives this Python what ComfyUI needs, so that it can run the host tests.

Does nothing where $COMFYUI_PYTHON runs it. torch stays as it is, and torchaudio is left
out: the host tests have a stand-in for it.
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

_LEFT_OUT = re.compile(r"torch(audio)?\s*([=<>~!;#].*)?")


def without_torch(requirements: str) -> str:
    """A requirements file without its lines for torch and torchaudio."""
    return "\n".join(line for line in requirements.splitlines() if not _LEFT_OUT.fullmatch(line.strip()))


def main() -> None:
    """Install."""
    if os.environ.get("COMFYUI_PYTHON"):
        return
    checkout = find_checkout()
    with tempfile.TemporaryDirectory() as folder:
        wanted, held = Path(folder, "wanted.txt"), Path(folder, "held.txt")
        wanted.write_text(without_torch((checkout / "requirements.txt").read_text()))
        held.write_text(f"torch=={version('torch')}\n")
        pip = [sys.executable, "-m", "pip", "install", "--quiet"]
        subprocess.run([*pip, "-r", str(wanted), "-c", str(held)], check=True)


if __name__ == "__main__":
    main()
