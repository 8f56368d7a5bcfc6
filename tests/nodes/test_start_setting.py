"""The pool starts with ComfyUI where the last session had one, or somebody asked for it in words that make sense."""

from __future__ import annotations

import json
import sys
from types import ModuleType, SimpleNamespace

import pytest

from nodes.panel import settings
from nodes.panel.settings import START_DEVICES as SETTING
from nodes.start_setting import (
    VARIABLE,
    remember_devices,
    start_early,
    start_pool,
    take_last_devices,
    wished_devices,
)
from parallel_runtime.requests.comfyui_code import ComfyuiCode
from workers import driver
from workers.client import supervisor_process
from workers.client.pool_registry import get_pool
from workers.launch import PoolSpec


@pytest.fixture
def settings_here(tmp_path, monkeypatch):
    """ComfyUI's file of settings, not there yet, and no wish in the environment."""
    file = tmp_path / "comfy.settings.json"
    monkeypatch.setattr(settings, "settings_file", lambda: file)
    monkeypatch.delenv(VARIABLE, raising=False)
    return file


@pytest.mark.parametrize(
    ("content", "environment", "last", "devices"),
    [
        ({SETTING: "0,1"}, None, "0", "0,1"),
        ({SETTING: "0,1"}, "cpu:2", "0", "cpu:2"),
        ({SETTING: "0,1"}, "", "0", None),
        ({SETTING: " "}, None, "0,1", "0,1"),
        ({SETTING: ""}, None, None, None),
        ({SETTING: "none"}, None, "0,1", None),
        ({SETTING: 7}, None, None, None),
        ([], None, "0", "0"),
        ({}, "auto", None, "auto"),
    ],
)
def test_the_environment_goes_before_the_setting_and_that_before_the_last_session(
    settings_here, monkeypatch, content, environment, last, devices
):
    settings_here.write_text(json.dumps(content))
    if environment is not None:
        monkeypatch.setenv(VARIABLE, environment)
    assert wished_devices(last) == devices


def test_no_or_damaged_settings_wish_nothing(settings_here):
    assert wished_devices(None) is None
    settings_here.write_bytes(b"{\xff")
    assert wished_devices(None) is None


@pytest.mark.parametrize(
    ("pool", "noted"),
    [("cuda:0,1", "0,1"), ("cuda:1", "1"), ("cpu:0,1", None), ("cuda:0,1*2", None)],
)
def test_a_session_starts_its_pool_where_the_one_before_used_its_own_on_gpus_of_this_machine(
    tmp_path, monkeypatch, pool, noted
):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    assert take_last_devices() == "auto"  # the first session
    remember_devices.__wrapped__(PoolSpec.parse(pool))
    assert take_last_devices() == noted
    assert take_last_devices() is None  # as that session used none


@pytest.mark.parametrize("content", [b"", b"0,\xff", b"0;rm", b"9" * 9999, b"all\n"])
def test_what_is_no_list_of_gpus_starts_nothing(tmp_path, monkeypatch, content):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    (tmp_path / "parallel-dit").mkdir()
    (tmp_path / "parallel-dit" / "last_devices").write_bytes(content)
    assert take_last_devices() is None


def test_a_wish_that_cannot_hold_is_logged_and_does_not_stop_comfyui(caplog):
    start_pool(get_pool, "first gpu")
    assert "first gpu" in caplog.text


@pytest.mark.parametrize(
    ("last", "environment", "on_cpu", "gpus", "visible", "begun"),
    [
        (None, None, False, 2, None, "cuda:0,1"),  # the first session: all
        ("0,1", None, False, 2, None, "cuda:0,1"),
        ("1", None, False, 2, None, "cuda:1"),
        ("0,1", None, False, 1, None, None),  # one was taken out
        ("0,1", None, False, 2, "1", None),
        ("0", None, False, 2, "1", "cuda:0"),
        (None, None, False, 2, ",".join(map(str, range(32))), "cuda:0,1"),  # --default-device names GPUs that are not
        (None, None, False, 2, "-1", None),
        (None, None, False, 2, "GPU-8c2e,GPU-11f0", "cuda:0,1"),
        ("0", None, True, 2, None, None),
        ("", None, False, 2, None, None),  # the last session used none
        ("0", "", False, 2, None, None),
        ("0", "cpu:2", True, 0, None, "cpu:0,1"),
        ("0", "first gpu", False, 2, None, None),
        (None, None, False, 0, None, None),
    ],
)
def test_processes_begin_before_torch_where_a_pool_would_start(
    tmp_path, monkeypatch, last, environment, on_cpu, gpus, visible, begun
):
    for name, value in ((VARIABLE, environment), ("CUDA_VISIBLE_DEVICES", visible), ("XDG_STATE_HOME", str(tmp_path))):
        monkeypatch.delenv(name, raising=False)
        if value is not None:
            monkeypatch.setenv(name, value)
    if last is not None:
        (tmp_path / "parallel-dit").mkdir()
        (tmp_path / "parallel-dit" / "last_devices").write_text(last)
    comfy, arguments, folders = ModuleType("comfy"), ModuleType("comfy.cli_args"), ModuleType("folder_paths")
    comfy.cli_args = arguments  # type: ignore[attr-defined]
    arguments.args = SimpleNamespace(cpu=on_cpu, fast=None)  # type: ignore[attr-defined]
    arguments.parser = SimpleNamespace(parse_args=lambda words: SimpleNamespace())  # type: ignore[attr-defined]
    comfy.__path__ = [str(tmp_path / "ComfyUI" / "comfy")]
    folders.get_user_directory = lambda: str(tmp_path)  # type: ignore[attr-defined]
    for module in (comfy, arguments, folders):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setattr(driver, "list_gpus", lambda: (None,) * gpus)
    started: list[PoolSpec] = []
    codes: list[ComfyuiCode] = []
    monkeypatch.setattr(
        supervisor_process, "start_early", lambda spec, code: (started.append(spec), codes.append(code))
    )
    monkeypatch.delitem(sys.modules, "nodes.comfyui_code", raising=False)
    start_early()
    sys.modules.pop("nodes.comfyui_code", None)  # it is this test's ComfyUI's
    assert {code.folder for code in codes} <= {str(tmp_path / "ComfyUI")}
    assert [str(spec) for spec in started] == ([begun] if begun else [])
