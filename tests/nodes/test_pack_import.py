"""The pack's root module registers its packages, leaves sys.path alone, and says who took a name."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

PACK = Path(__file__).resolve().parents[2]

IMPORT_AS_COMFYUI_DOES = """
import importlib.util, sys
path = sys.argv[1]
spec = importlib.util.spec_from_file_location("a_pack", path + "/__init__.py")
module = importlib.util.module_from_spec(spec)
sys.modules["a_pack"] = module
before = list(sys.path)
spec.loader.exec_module(module)
assert sys.path == before
"""


def run(script: str, cwd: Path, **environment: str) -> subprocess.CompletedProcess:
    command, environment = [sys.executable, "-c", script, str(PACK)], {**os.environ, **environment}
    return subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=600)


def test_import_registers_the_packages_and_hides_no_module_of_comfyui(tmp_path):
    script = (
        IMPORT_AS_COMFYUI_DOES
        + """
import parallel_runtime.config, workers
spec.loader.exec_module(module)  # a second import, as after a reload, is fine
assert callable(module.comfy_entrypoint) and module.WEB_DIRECTORY == "./web"
assert "nodes" not in sys.modules and importlib.util.find_spec("nodes") is None
assert not {"torch", "diffusers", "comfy"} & sys.modules.keys()
"""
    )
    done = run(script, tmp_path)
    assert done.returncode == 0, done.stderr


def test_a_foreign_package_of_that_name_is_named(tmp_path):
    foreign = tmp_path / "workers"
    foreign.mkdir()
    (foreign / "__init__.py").touch()
    done = run("import workers\n" + IMPORT_AS_COMFYUI_DOES, tmp_path)
    assert done.returncode != 0
    assert (
        f"ImportError: Parallel DiT needs the Python package name 'workers', which {foreign} has taken" in done.stderr
    )


@pytest.mark.parametrize(("version", "old"), [("0.3.64", True), ("0.7.9", True), ("0.8.0", False), ("0.33.0", False)])
def test_an_older_comfyui_is_told_in_one_sentence_and_has_no_nodes(tmp_path, version, old):
    (tmp_path / "comfyui_version.py").write_text(f'__version__ = "{version}"')
    done = run(IMPORT_AS_COMFYUI_DOES + f"assert hasattr(module, 'NODE_CLASS_MAPPINGS') == {old}", tmp_path)
    assert done.returncode == 0, done.stderr
    said = f"Parallel DiT needs ComfyUI 0.8.0 or newer, and this is {version}: its nodes are left out. Update ComfyUI."
    assert done.stderr.strip() == (said if old else "")


def test_windows_is_told_in_one_sentence_and_has_no_nodes(tmp_path):
    other = "import sys; sys.platform = 'win32'\n"
    done = run(other + IMPORT_AS_COMFYUI_DOES + "assert module.NODE_CLASS_MAPPINGS == {}", tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stderr.startswith("Parallel DiT runs on Linux, and this is win32: its nodes are left out.")


def test_node_logic_needs_neither_comfyui_nor_diffusers(tmp_path):
    script = (
        "import sys; sys.path.insert(0, sys.argv[1])\n"
        "import nodes.transportable, nodes.remote_transformer, nodes.model_files, nodes.start_setting\n"
        "assert not {'diffusers', 'comfy', 'workers', 'folder_paths'} & sys.modules.keys()\n"
    )
    done = run(script, tmp_path)
    assert done.returncode == 0, done.stderr


RUN_BEFORE_TORCH = """
import runpy, sys, types
for name in ("comfy", "comfy.cli_args", "folder_paths"):
    sys.modules[name] = types.ModuleType(name)
sys.modules["comfy"].cli_args = sys.modules["comfy.cli_args"]
sys.modules["comfy"].__path__ = ["/nowhere/comfy"]
arguments = sys.modules["comfy.cli_args"]
arguments.args = types.SimpleNamespace(cpu=True, fast=None)
arguments.parser = types.SimpleNamespace(parse_args=lambda words: types.SimpleNamespace())
sys.modules["folder_paths"].get_user_directory = lambda: "/nowhere"
path = list(sys.path)
runpy.run_path(sys.argv[1] + "/prestartup_script.py")
from workers.client.supervisor_process import _early
"""


def test_what_comfyui_runs_before_torch_imports_none(tmp_path):
    script = (
        RUN_BEFORE_TORCH
        + """
assert not {"torch", "numpy", "nodes"} & sys.modules.keys()
assert sys.path == path
print(*_early)
"""
    )
    done = run(script, tmp_path, PARALLEL_DIT_START="cpu:2")
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "cpu:0,1"


def test_what_began_before_torch_ends_where_the_nodes_cannot_be_imported(tmp_path):
    script = (
        RUN_BEFORE_TORCH
        + IMPORT_AS_COMFYUI_DOES
        + """
assert _early
sys.modules["a_pack.nodes.extension"] = None  # as where this ComfyUI lacks what the nodes import
try:
    module.comfy_entrypoint()
except ImportError:
    print(*_early)
"""
    )
    done = run(script, tmp_path, PARALLEL_DIT_START="cpu:2")
    assert (done.returncode, done.stdout.strip()) == (0, ""), done.stdout + done.stderr
