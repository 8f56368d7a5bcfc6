"""The pack is installed beside the oldest and the newest packages that ComfyUI allows, and changes none of them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

REQUIREMENTS = Path(__file__).resolve().parents[1] / "requirements.txt"
STARTS = "from transformers import CLIPTokenizer, T5TokenizerFast"
"""What ComfyUI does at its start, and what fails where transformers refuses the version of huggingface-hub."""


@pytest.mark.long
@pytest.mark.parametrize(
    "there",
    [
        ["transformers==4.50.3", "huggingface-hub==0.26.0"],  # the oldest that ComfyUI 0.8.0 and 0.33 are content with
        ["transformers<5", "huggingface-hub<1"],  # what the newest transformers 4 takes
        ["transformers", "huggingface-hub"],
    ],
    ids=lambda there: there[0],
)
def test_nothing_of_comfyuis_is_replaced(tmp_path, there):
    python = tmp_path / "venv" / "bin" / "python"
    subprocess.run([sys.executable, "-m", "venv", str(tmp_path / "venv")], check=True)

    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}  # the tests' own modules

    def run(*command: str) -> str:
        done = subprocess.run([str(python), *command], env=environment, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        return done.stdout

    run("-m", "pip", "install", "--quiet", "sentencepiece", *there)
    before = run("-m", "pip", "freeze").splitlines()
    run("-m", "pip", "install", "--quiet", "-r", str(REQUIREMENTS))
    after = run("-m", "pip", "freeze").splitlines()
    assert set(before) <= set(after)
    assert {line.partition("==")[0] for line in set(after) - set(before)} == {"msgspec", "nvidia-ml-py"}
    run("-c", STARTS)
