"""What took how long."""

from __future__ import annotations

import time

import pytest

from workers.rank.laps import Laps


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
