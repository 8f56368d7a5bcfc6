"""The pool starts with ComfyUI where the last session had one, or somebody asked for it in words that make sense."""

from __future__ import annotations

import json

import pytest

from nodes.panel.settings import START_DEVICES as SETTING
from nodes.start_setting import remember_devices, start_pool, take_last_devices, wished_devices
from parallel_runtime.requests.requests import ComfyuiCode
from workers.client.pool_registry import get_pool
from workers.launch import PoolSpec


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
    tmp_path, content, environment, last, devices
):
    settings = tmp_path / "comfy.settings.json"
    settings.write_text(json.dumps(content))
    assert wished_devices(settings, environment, last) == devices


def test_no_or_damaged_settings_wish_nothing(tmp_path):
    settings = tmp_path / "comfy.settings.json"
    assert wished_devices(settings, None, None) is None
    settings.write_bytes(b"{\xff")
    assert wished_devices(settings, None, None) is None


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
    start_pool(get_pool, "first gpu", ComfyuiCode("", {}))
    assert "first gpu" in caplog.text
