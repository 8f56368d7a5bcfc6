"""A rank that gets nowhere is told from a slow one, and from a machine that slept. Time is a number here."""

from __future__ import annotations

from workers.stall import TICK_SECONDS, Stall, StallWatch


def tick_until(watch: StallWatch, start: float, end: float) -> Stall | None:
    """Tick as the supervisor does; return the first stall."""
    now = start
    while now <= end:
        if (stall := watch.tick(now)) is not None:
            return stall
        now += TICK_SECONDS
    return None


def test_the_rank_without_progress_stalls_when_its_bound_is_over_and_not_before():
    watch = StallWatch(floor=10)
    watch.start(2, now=0)
    for second in range(1, 30):
        watch.beat(0, second, second)  # rank 0 gets on; rank 1 lives, and gets nowhere
        watch.beat(1, 7, second)
        stall = watch.tick(second)
        if stall is not None:
            break
    assert stall is not None
    assert (stall.rank, second) == (1, 12)  # its first beat, at 1 s, still was news


def test_ranks_that_wait_for_one_that_compiles_do_not_stall_until_it_is_done():
    watch = StallWatch(floor=10)
    watch.start(2, now=0)
    for second in range(1, 60):
        watch.waited(second)
        assert watch.tick(second) is None
    assert tick_until(watch, 59, 69) is None
    assert tick_until(watch, 69.5, 80) is not None


def test_slow_steps_lengthen_the_bound_to_ten_of_them():
    watch = StallWatch(floor=10)
    watch.start(1, now=0)
    for step in range(4):
        watch.step(now=step * 6.0)
    assert watch.bound == 60
    assert tick_until(watch, 0, 59) is None
    assert tick_until(watch, 59, 70) is not None


def test_time_in_which_the_supervisor_itself_stood_still_counts_for_nobody():
    watch = StallWatch(floor=10)
    watch.start(2, now=0)
    assert tick_until(watch, 0, 8) is None
    assert watch.tick(8 + 3600) is None  # the whole machine slept for an hour
    assert tick_until(watch, 3608.5, 3609.5) is None
    stall = tick_until(watch, 3610, 3620)
    assert stall is not None
    assert stall.seconds < 12


def test_nothing_stalls_while_no_job_is_on():
    watch = StallWatch(floor=10)
    watch.start(2, now=0)
    watch.stop()
    assert tick_until(watch, 0, 100) is None
