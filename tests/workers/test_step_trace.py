"""Where a step's time goes adds up to the step."""

from __future__ import annotations

import re

from workers.step_trace import EVERY, PARTS, StepTrace


def test_medians_of_every_part_are_told_after_some_steps():
    trace = StepTrace(enabled=True)
    stamps = [step * 0.001 * part for step in (1,) for part in range(len(PARTS) + 1)]
    told = [trace.add(stamps) for _ in range(2 * EVERY)]
    assert [bool(text) for text in told] == ([False] * (EVERY - 1) + [True]) * 2
    assert re.findall(r" (\d\.\d\d)", told[EVERY - 1]) == ["1.00"] * len(PARTS) + [f"{len(PARTS):.2f}"]
    assert all(part in told[EVERY - 1] for part in PARTS)


def test_nothing_is_kept_unless_it_is_asked_for(monkeypatch):
    monkeypatch.delenv("PARALLEL_DIT_TRACE", raising=False)
    trace = StepTrace()
    assert [trace.add([0.0] * (len(PARTS) + 1)) for _ in range(2 * EVERY)] == [""] * (2 * EVERY)
