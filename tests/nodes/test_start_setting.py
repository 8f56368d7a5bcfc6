"""The pool starts with ComfyUI only where somebody asked for it in words that make sense."""

from __future__ import annotations

import json

import pytest

from nodes.panel.settings import START_DEVICES as SETTING
from nodes.start_setting import start_pool, wished_devices


@pytest.mark.parametrize(
    ("content", "environment", "devices"),
    [
        ({SETTING: "0,1"}, None, "0,1"),
        ({SETTING: "0,1"}, "cpu:2", "cpu:2"),
        ({SETTING: "0,1"}, "", None),
        ({SETTING: ""}, None, None),
        ({SETTING: 7}, None, None),
        ([], None, None),
        ({}, "auto", "auto"),
    ],
)
def test_the_environment_goes_before_the_setting(tmp_path, content, environment, devices):
    settings = tmp_path / "comfy.settings.json"
    settings.write_text(json.dumps(content))
    assert wished_devices(settings, environment) == devices


def test_no_or_damaged_settings_wish_nothing(tmp_path):
    settings = tmp_path / "comfy.settings.json"
    assert wished_devices(settings, None) is None
    settings.write_bytes(b"{\xff")
    assert wished_devices(settings, None) is None


def test_a_wish_that_cannot_hold_is_logged_and_does_not_stop_comfyui(caplog):
    start_pool("first gpu")
    assert "first gpu" in caplog.text
