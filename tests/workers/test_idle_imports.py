"""What a rank imports between jobs, by its own thread: nothing before it waits, everything that later jobs need."""

from __future__ import annotations

import os
import pickle
import queue
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch

from parallel_runtime.requests.comfyui_code import ComfyuiCode
from tests.comfyui_checkout import HOW, find_comfyui
from tests.tiny_lora import KINDS, peft, write_lora
from workers.rank import inbox as idle_imports
from workers.rank.inbox import Inbox, import_ahead

CODE = ComfyuiCode("/comfyui")
PARTS = ("one", "two", "three")


@pytest.fixture
def package(tmp_path, monkeypatch):
    """A package of modules, each of which a rank imports by itself; its name."""
    name = f"imported_{tmp_path.name}"
    folder = tmp_path / name
    folder.mkdir()
    (folder / "__init__.py").write_text("")
    for part in PARTS:
        (folder / f"{part}.py").write_text("")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(idle_imports, "MODULES", tuple(f"{name}.{part}" for part in PARTS))
    monkeypatch.setattr(idle_imports, "LOADING", ())
    monkeypatch.setattr(idle_imports, "use_comfyui", lambda *_: None)
    yield name
    for each in [module for module in sys.modules if module.startswith(name)]:
        del sys.modules[each]


def here(package: str) -> list[str]:
    return [part for part in PARTS if f"{package}.{part}" in sys.modules]


def test_code_that_is_wanted_comes_before_the_compiler_with_what_its_networks_need(package, monkeypatch):
    compiler = []
    monkeypatch.setattr(idle_imports, "MODULES", (f"{package}.one",))
    monkeypatch.setattr(idle_imports, "LOADING", (f"{package}.two",))
    monkeypatch.setattr(idle_imports.compiler, "imports", lambda: [lambda: compiler.append(here(package))])
    assert all(import_ahead(torch.device("cuda"), CODE))
    assert compiler == [["one", "two"]]


def test_a_rank_imports_by_its_own_thread_while_it_waits_and_a_job_waits_for_one_part_at_most(package, monkeypatch):
    inbox = Inbox(connection=None)
    frames: queue.SimpleQueue = inbox._frames
    seen = []
    job = object()

    def watched():
        for imported in import_ahead(torch.device("cpu"), CODE):
            seen.append((threading.current_thread(), here(package)))
            if len(here(package)) == 1:
                frames.put(job)  # it comes while a part is imported
            yield imported

    imports = watched()
    assert inbox.next(imports) is job
    assert {thread for thread, _ in seen} == {threading.current_thread()}
    assert here(package) == ["one"]
    frames.put(job)
    assert inbox.next(imports) is job
    assert here(package) == ["one"]  # a job that is there goes first


def test_a_rank_on_a_gpu_begins_with_the_compiler_and_one_on_a_cpu_does_not(monkeypatch):
    monkeypatch.setattr(idle_imports.compiler, "imports", lambda: [lambda: None] * 3)
    assert list(import_ahead(torch.device("cuda"))) == [True] * 3
    assert list(import_ahead(torch.device("cpu"))) == []


def test_a_comfyui_that_cannot_be_imported_costs_a_line_in_the_log(package, monkeypatch, caplog):
    monkeypatch.setattr(idle_imports, "MODULES", (f"{package}.absent", f"{package}.one"))
    caplog.set_level("INFO")
    assert all(import_ahead(torch.device("cpu"), CODE))
    assert f"ModuleNotFoundError: No module named '{package}.absent'" in caplog.text


@pytest.mark.slow
def test_compiling_after_these_imports_imports_the_compilers_modules_no_more():
    code = (
        "import sys, torch\n"
        "from parallel_runtime.acceleration.compiler import imports\n"
        "for part in imports(): part()\n"
        "before = len(sys.modules)\n"
        "import torch._inductor.codegen.triton, torch._dynamo.eval_frame, torch._inductor.select_algorithm\n"
        "assert len(sys.modules) == before, sorted(sys.modules)[-5:]\n"
    )
    root = Path(__file__).parents[2]
    done = subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
@pytest.mark.skipif(find_comfyui() is None, reason=HOW)
def test_the_first_patch_after_that_imports_nothing(tmp_path):
    root = find_comfyui()
    child = Path(__file__).with_name("idle_imports_run.py")
    for number, kind in enumerate(KINDS):
        write_lora(tmp_path / f"{number}.safetensors", {"a": (32, 16)}, kind=kind, spell=peft)
    (tmp_path / "sets").write_bytes(pickle.dumps(read_sets(root, tmp_path)))
    repository = Path(__file__).parents[2]
    path = os.pathsep.join([str(repository), os.environ.get("PYTHONPATH", "")])
    given = subprocess.run(
        [sys.executable, child, root, tmp_path / "sets"], cwd=repository, text=True, capture_output=True, timeout=600,
        env={**os.environ, "PYTHONPATH": path}, check=False,
    )  # fmt: skip
    assert given.returncode == 0, given.stderr
    idle, after = given.stdout.split("\n")[-3:-1]
    assert int(idle) > 100
    assert after == ""


def read_sets(root: Path, folder: Path) -> list:
    """The files as the ranks get them: weights, and beside the layer."""
    from parallel_runtime.networks.comfyui.comfy_code import use_comfyui
    from parallel_runtime.patching.patch_data import Encoder

    use_comfyui(str(root), {"cpu": True})
    import comfy.lora
    import comfy.utils

    sets = []
    for file in sorted(folder.glob("*.safetensors")):
        names = {"diffusion_model.a": "diffusion_model.a.weight"}
        patches = comfy.lora.load_lora(comfy.utils.load_torch_file(str(file)), names)
        assert patches
        given = {key: [(0.5, value, 1.0, None, None)] for key, value in patches.items()}
        sets.append(Encoder().encode(given))
        adapter = next(iter(patches.values()))
        if type(adapter).__name__ == "LoRAAdapter":
            sets.append(Encoder().encode({}, {"diffusion_model.a": (adapter, 0.5)}))
    return sets
