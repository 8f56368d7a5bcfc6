"""Where a step's time goes adds up to the step."""

from __future__ import annotations

import re

from workers.client.step_trace import EVERY, PARTS, StepTrace


def test_medians_of_every_part_are_told_after_some_steps():
    trace = StepTrace(enabled=True)
    told = []
    for step in range(2 * EVERY + 1):  # the first has none before it
        start = step * len(PARTS) * 0.001
        told.append(trace.add([start + 0.001 * part for part in range(len(PARTS))]))
    assert [bool(text) for text in told] == [False] + ([False] * (EVERY - 1) + [True]) * 2
    assert re.findall(r" (\d+\.\d\d)", told[EVERY]) == ["1.00"] * len(PARTS) + [f"{len(PARTS):.2f}"]
    assert all(part in told[EVERY] for part in PARTS)


def test_the_pause_between_two_runs_is_no_part_of_a_step():
    trace = StepTrace(enabled=True)
    stamps = [0.001 * part for part in range(len(PARTS))]
    told = [trace.add([run * 10 + stamp for stamp in stamps]) for run in range(3 * EVERY)]
    assert told == [""] * (3 * EVERY)


def test_nothing_is_kept_unless_it_is_asked_for(monkeypatch):
    monkeypatch.delenv("PARALLEL_DIT_TRACE", raising=False)
    trace = StepTrace()
    assert [trace.add([0.0] * len(PARTS)) for _ in range(2 * EVERY)] == [""] * (2 * EVERY)
