"""ComfyUI 0.8.0 in a browser: one click, a run on two ranks, the panel, an error.

With the frontend of that version where $COMFYUI080_FRONTEND names its folder, else with the one that is installed.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from tests.host.comfy_host import ComfyHost
from tests.host.find_host import find_host
from tests.host.host_models import write_models
from tests.host.workflow import Workflow

from .conversion import press
from .test_errors_on_the_canvas import FAULTS, TITLE
from .test_errors_on_the_canvas import queue as queue_fault
from .test_panel import open_prompt, panel_text, queue, set_setting, show_panel, text_on, wait_for

OLDER = Path.home() / "ComfyUI080"

pytestmark = [
    pytest.mark.host,
    pytest.mark.slow,
    pytest.mark.skipif(not (OLDER / "main.py").is_file(), reason="no ComfyUI 0.8 in ComfyUI080"),
]


@pytest.fixture(scope="module")
def host(tmp_path_factory) -> Iterator[ComfyHost]:
    """The older one, in the place of the session's."""
    frontend = os.environ.get("COMFYUI080_FRONTEND")
    options = ["--front-end-root", frontend] if frontend else []
    comfy = ComfyHost(replace(find_host(), path=OLDER), tmp_path_factory.mktemp("older") / "base", options)
    try:
        write_models(comfy)
        yield comfy
    finally:
        comfy.stop()


def test_one_click_a_run_the_panel_and_an_error(host, canvas, tmp_path):
    open_prompt(canvas, Workflow(model="plan.safetensors", seed=801, steps=4).prompt())
    press(canvas)
    assert "ParallelLoader" in [node["type"] for node in canvas.saved()["nodes"]]
    set_setting(canvas, "ParallelDiT.DefaultDevices", "cpu:2")
    queue(canvas, host)
    wait_for(lambda: "ulysses 2" in text_on(canvas, "KSampler"))
    wait_for(lambda: text_on(canvas, "ParallelLoader").startswith("One picture of "))
    show_panel(canvas, True)
    wait_for(lambda: "plan.safetensors" in panel_text(canvas) and "measured" in panel_text(canvas))
    canvas.picture(tmp_path / "older.png")
    show_panel(canvas, False)

    seen = queue_fault(canvas, FAULTS["wrong devices"])
    assert TITLE in seen["marked"]
    assert "seven" in seen["error"]
    canvas.picture(tmp_path / "older_error.png")
    set_setting(canvas, "Comfy.Locale", "zh")
    assert "无法理解 devices" in queue_fault(canvas, FAULTS["wrong devices"])["error"]
    assert "它读取其中的注意力图" in queue_fault(canvas, FAULTS["a node that is refused"])["foreseen"]
