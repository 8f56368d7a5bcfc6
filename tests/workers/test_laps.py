"""What took how long."""

from __future__ import annotations

import time

import pytest

from workers.rank.laps import FirstStep, Laps


def test_parts_follow_each_other_and_add_up(monkeypatch):
    now = 100.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    laps = Laps(since=2.0)
    now = 101.5
    laps.end("imports")
    now = 101.75
    laps.end("group")
    assert str(laps) == "imports 3.5 s, group 0.2 s"
    assert laps.total == pytest.approx(3.75)


def test_a_process_is_timed_from_its_own_beginning():
    laps = Laps.of_process()
    laps.end("until now")
    assert 0 < laps.total < 24 * 3600


def test_jobs_and_waiting_add_up_to_the_first_step_which_is_told_once(caplog, monkeypatch):
    caplog.set_level("INFO")
    now = 0.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    first = FirstStep(5.0, lambda: 0.5)
    now = 1.0
    first.end("waiting")
    first.weights()
    now = 3.0
    first.weights()
    first.end("Load")
    now = 3.25
    first.end("waiting")
    now = 4.5
    first.step("Sample")
    now = 9.0
    first.step("Sample")
    assert caplog.messages == [
        "First step 9.5 s after this process began: start 5.0 s, waiting 1.2 s, Load 2.0 s, Sample 1.2 s; "
        "of these weights 2.0 s, graphs 0.5 s."
    ]
