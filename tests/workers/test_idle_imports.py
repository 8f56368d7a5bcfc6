"""What a rank imports between jobs: nothing while it has one, everything that a LoRA needs; in nobody's way."""

from __future__ import annotations

import importlib
import os
import pickle
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch

from parallel_runtime.requests.requests import ComfyuiCode, ConditioningRef, Forward, KeepPatches, Load
from tests.comfyui_checkout import HOW, find_comfyui
from tests.patience import wait_until
from tests.tiny_lora import KINDS, peft, write_lora
from workers.rank import idle_imports
from workers.rank.idle_imports import IdleImports

CODE = ComfyuiCode("/comfyui")
LOAD = Load("m", "p", "float32", {}, 1, patching=CODE)
FORWARD = Forward("m", ConditioningRef(1))
PARTS = ("one", "two", "three")


@pytest.fixture
def package(tmp_path, monkeypatch):
    """A package whose modules import each other, as ComfyUI's; its name."""
    name = f"imported_{tmp_path.name}"
    folder = tmp_path / name
    folder.mkdir()
    (folder / "__init__.py").write_text("")
    for part, nextone in zip(PARTS, (*PARTS[1:], None), strict=True):
        (folder / f"{part}.py").write_text(f"from . import {nextone}\n" if nextone else "")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(idle_imports, "MODULES", (f"{name}.one",))
    monkeypatch.setattr(idle_imports, "QUIET_SECONDS", 0.0)
    monkeypatch.setattr(idle_imports, "use_comfyui", lambda *_: None)
    yield name
    for each in [module for module in sys.modules if module.startswith(name)]:
        del sys.modules[each]


def here(package: str) -> list[str]:
    return [part for part in PARTS if f"{package}.{part}" in sys.modules]


def join() -> None:
    for thread in threading.enumerate():
        if thread.name == "idle-imports":
            thread.join(60)
            assert not thread.is_alive()


def test_a_rank_imports_after_its_first_picture_when_it_is_idle_and_not_before(package):
    imports = IdleImports(torch.device("cpu"))
    imports.work()
    imports.after(LOAD)
    imports.rest()
    assert not any(thread.name == "idle-imports" for thread in threading.enumerate())  # the first step is to come
    imports.work()
    imports.after(FORWARD)
    time.sleep(0.1)
    assert here(package) == []
    imports.rest()
    join()
    assert here(package) == list(PARTS)
    assert not any(isinstance(each, idle_imports._Pauses) for each in sys.meta_path)
    imports.after(FORWARD)
    assert not any(thread.name == "idle-imports" for thread in threading.enumerate())  # once


def test_it_stops_between_two_modules_when_a_job_comes_and_a_job_that_needs_them_does_not_wait(package):
    imports = IdleImports(torch.device("cpu"))
    first = Path(importlib.import_module(package).__path__[0], "one.py")
    first.write_text(f"import sys\nsys.modules[{package!r}].begins()\n{first.read_text()}")
    sys.modules[package].begins = imports.work  # a job comes while this module is imported
    imports.rest()
    imports.after(KeepPatches(CODE))
    assert wait_until(lambda: here(package))
    time.sleep(0.3)  # in which it could go on
    assert here(package) == ["one"]
    importlib.import_module(f"{package}.one")  # half imported by the other thread, which this one waits for
    assert here(package) == list(PARTS)
    join()


def test_a_comfyui_that_cannot_be_imported_costs_a_line_in_the_log(package, monkeypatch, caplog):
    monkeypatch.setattr(idle_imports, "MODULES", (f"{package}.absent",))
    caplog.set_level("INFO")
    imports = IdleImports(torch.device("cpu"))
    imports.rest()
    imports.after(KeepPatches(CODE))
    join()
    assert f"ModuleNotFoundError: No module named '{package}.absent'" in caplog.text


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
    from parallel_runtime.networks.comfyui.host_code import use_comfyui
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
