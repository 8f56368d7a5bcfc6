"""A Python without diffusers and yunchang: all of the client and of the ranks is there, and who needs one says so."""

from __future__ import annotations

import subprocess
import sys

from tests.nodes.test_imports_of_comfyui import OURS, ROOT, imports_of
from tests.tiny_flux import tiny_config, write_diffusers_folder, write_original

WITHOUT = """
import sys
sys.modules.update(dict.fromkeys(("diffusers", "yunchang")))  # neither is found, nor can be imported
"""
REFUSALS = (
    WITHOUT
    + """
import os
from pathlib import Path
import workers.client.client, workers.rank.start
from nodes.network_choice import choose_network
from parallel_runtime.attention.yunchang_exchange import chosen_exchange
from parallel_runtime.errors import ParallelError
from parallel_runtime.loading.checkpoint import open_checkpoint
from parallel_runtime.loading.weights import build_transformer
file, folder = map(Path, sys.argv[1:])
os.environ.update(PARALLEL_DIT_OFF="exchange", LOCAL_WORLD_SIZE="2", WORLD_SIZE="2")
for call in (
    lambda: choose_network(folder),
    lambda: choose_network(file, "diffusers"),
    lambda: build_transformer(open_checkpoint(file)),
    chosen_exchange,
):
    try:
        call()
    except ParallelError as error:
        print(type(error).__name__, str(error), sep=": ")
"""
)


def run(script: str, *arguments: object) -> list[str]:
    done = subprocess.run([sys.executable, "-c", script, *map(str, arguments)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_two_files_import_them():
    """Each in a function, as the other test finds."""
    asking = {
        path.name
        for package in OURS
        for path in (ROOT / package).rglob("*.py")
        for name in imports_of(path)
        if name.partition(".")[0] in ("diffusers", "yunchang")
    }
    assert asking == {"lean_imports.py", "yunchang_exchange.py"}


def test_client_and_ranks_start_without_them_and_what_needs_them_says_so(tmp_path):
    file = write_original(tmp_path / "file.safetensors", tiny_config(num_layers=1, num_single_layers=1))
    folder = write_diffusers_folder(tmp_path / "folder", tiny_config(num_layers=1, num_single_layers=1))
    *without_diffusers, without_yunchang = run(REFUSALS, file, folder)
    cause, fix = "package diffusers (0.42 or newer), which is not installed.", '-m pip install ".[diffusers]"'
    assert [cause in line and line.endswith(fix) for line in without_diffusers] == [True] * 3
    assert without_yunchang.startswith("ConfigurationError: PARALLEL_DIT_OFF switches our exchange off, and")
