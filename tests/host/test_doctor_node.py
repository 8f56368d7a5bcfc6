"""Parallel Doctor in ComfyUI: its report on the node, each time anew, beside a running pool, and cancelled."""

from __future__ import annotations

import pytest

from .comfy_host import Run
from .test_graph_stays_a_graph import pool_pids
from .workflow import Prompt, Workflow, link, node

pytestmark = pytest.mark.host


def doctor(devices: str = "cpu:2") -> Prompt:
    auto = dict.fromkeys(("cfg", "data", "ulysses", "attention"), "auto")
    return {
        # false: as prompts say that were made before there was a third choice
        "config": node("ParallelConfig", devices=devices, compile=False, **auto),
        "doctor": node("ParallelDoctor", parallel_config=link("config")),
        "text": node("PreviewAny", source=link("doctor")),
    }


@pytest.mark.slow
def test_the_report_is_on_the_node_and_a_running_pool_stays(host):
    assert host.run(Workflow(loader="cpu:2", seed=301).prompt()).error is None
    pool = pool_pids(host)
    run = host.run(doctor())
    assert run.error is None, run.error
    (text,) = run.outputs["doctor"]["text"]
    assert "gloo on cpu:0,1: the right numbers" in text
    assert ("doctor", text) in run.texts
    assert run.outputs["text"]["text"] == (text,) or run.outputs["text"]["text"] == [text]
    assert pool_pids(host) == pool != set()
    assert "doctor" in host.run(doctor()).executed  # the same graph again: no cached report


@pytest.mark.slow
def test_devices_that_are_not_there_are_an_error_at_the_node(host):
    run = host.run(doctor("5"))
    assert run.error is not None
    assert run.error["node_id"] == "doctor"
    assert "asks for GPU 5" in run.error["exception_message"]


@pytest.mark.slow
def test_cancel_ends_the_doctor_at_once(host):
    pressed: list[bool] = []

    def press(run: Run) -> None:
        if "doctor" in run.executed and not pressed:
            pressed.append(True)
            host.interrupt()

    run = host.run(doctor(), during=press)
    assert run.interrupted
    assert run.error is None
    assert not any("the right numbers" in text for _, text in run.texts), "it went on to its end"
