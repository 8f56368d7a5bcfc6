"""A Python without diffusers: all of the client and of the ranks is there, and who needs one says so."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.nodes.test_imports_of_comfyui import OURS, ROOT, imports_of
from tests.tiny_flux import tiny_config, write_diffusers_folder

WITHOUT = """
import sys
sys.modules["diffusers"] = None  # is not found, nor can be imported
"""
REFUSAL = (
    WITHOUT
    + """
from pathlib import Path
import workers.client.client, workers.rank.start
from parallel_runtime.errors import ParallelError
from parallel_runtime.loading.checkpoint import build_transformer, open_checkpoint
folder = Path(sys.argv[1])
try:
    build_transformer(open_checkpoint(folder))
except ParallelError as error:
    print(error)
"""
)


def run(script: str, *arguments: object) -> list[str]:
    done = subprocess.run([sys.executable, "-c", script, *map(str, arguments)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_one_file_imports_it():
    """In a function, as the other test finds."""
    asking = {
        path.name
        for package in OURS
        for path in (ROOT / package).rglob("*.py")
        for name in imports_of(path)
        if name.partition(".")[0] == "diffusers"
    }
    assert asking == {"lean_imports.py"}


@pytest.mark.slow
def test_client_and_ranks_start_without_it_and_what_needs_it_says_so(tmp_path):
    folder = write_diffusers_folder(tmp_path / "folder", tiny_config(num_layers=1, num_single_layers=1))
    (refusal,) = run(REFUSAL, folder)
    cause, fix = "package diffusers (0.42 or newer), which is not installed.", '-m pip install ".[diffusers]"'
    assert cause in refusal
    assert refusal.endswith(fix)
