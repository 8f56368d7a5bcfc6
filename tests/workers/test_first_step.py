"""What the time to the first step went by with."""

from __future__ import annotations

from workers.rank.first_step import FirstStep


def test_jobs_and_waiting_add_up_to_the_first_step_which_is_told_once(caplog):
    caplog.set_level("INFO")
    now = 0.0
    first = FirstStep(5.0, lambda: 0.5, clock=lambda: now)
    now = 1.0
    first.lap("waiting")
    first.weights()
    now = 3.0
    first.weights()
    first.lap("Load")
    now = 3.25
    first.lap("waiting")
    now = 4.5
    first.step("Sample")
    now = 9.0
    first.step("Sample")
    assert caplog.messages == [
        "First step 9.5 s after this process began: start 5.0, waiting 1.2, Load 2.0, Sample 1.2; "
        "of these weights 2.0, graphs 0.5."
    ]
