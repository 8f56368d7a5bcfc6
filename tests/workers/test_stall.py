"""A rank that gets nowhere is told from a slow one, and from a machine that slept. Time is a number here."""

from __future__ import annotations

from workers.supervisor.jobs import TICK_SECONDS, StallWatch


def tick_until(watch: StallWatch, start: float, end: float) -> tuple[int, float] | None:
    """Tick as the supervisor does; return the first stall."""
    now = start
    while now <= end:
        if (stall := watch.tick(now)) is not None:
            return stall
        now += TICK_SECONDS
    return None


def test_the_rank_that_stood_still_first_is_named_when_the_last_one_has_stood_still_for_the_bound():
    watch = StallWatch(floor=10)
    watch.start(2, now=0)
    for second in range(1, 30):
        watch.beat(0, min(second, 5), second)  # rank 0 gets as far as the next collective
        watch.beat(1, 7, second)  # rank 1 lives, and gets nowhere
        stall = watch.tick(second)
        if stall is not None:
            break
    assert stall is not None
    assert (stall[0], second) == (1, 16)


def test_a_hang_is_found_within_a_minute_where_nothing_else_is_set():
    watch = StallWatch()
    watch.start(1, now=0)
    watch.beat(0, 1, 0)
    stall = tick_until(watch, 0, 600)
    assert stall is not None
    assert 30 < stall[1] <= 60 + TICK_SECONDS


def test_a_rank_that_waits_in_a_collective_is_not_named():
    watch = StallWatch(floor=10)
    watch.start(2, now=0)
    for second in range(1, 30):
        watch.beat(0, 7, second, waits=True)
        watch.beat(1, min(second, 2), second)
        stall = watch.tick(second)
        if stall is not None:
            break
    assert stall is not None
    assert stall[0] == 1


def test_a_rank_that_waits_for_one_that_gets_on_has_not_stalled():
    watch = StallWatch(floor=10)
    watch.start(2, now=0)
    for second in range(600):  # a step of ten minutes, of whose blocks rank 1 has none
        watch.beat(0, second // 9, second)
        watch.beat(1, 7, second)
        assert watch.tick(second) is None


def test_a_rank_that_has_answered_is_not_awaited_and_takes_no_blame():
    watch = StallWatch(floor=10)
    watch.start(2, now=0)
    watch.through(0)
    for second in range(1, 100):
        watch.beat(0, second, second)
        stall = watch.tick(second)
        if stall is not None:
            break
    assert stall is not None
    assert (stall[0], second) == (1, 11)
    watch.through(1)
    assert watch.tick(second + 1) is None


def test_ranks_that_wait_for_one_that_compiles_do_not_stall_until_it_is_done():
    watch = StallWatch(floor=10)
    watch.start(2, now=0)
    for second in range(1, 60):
        watch.waited(second)
        assert watch.tick(second) is None
    assert tick_until(watch, 59, 69) is None
    assert tick_until(watch, 69.5, 80) is not None


def test_time_in_which_the_supervisor_itself_stood_still_counts_for_nobody():
    watch = StallWatch(floor=10)
    watch.start(2, now=0)
    assert tick_until(watch, 0, 8) is None
    assert watch.tick(8 + 3600) is None  # the whole machine slept for an hour
    assert tick_until(watch, 3608.5, 3609.5) is None
    stall = tick_until(watch, 3610, 3620)
    assert stall is not None
    assert stall[1] < 12


def test_nothing_stalls_while_no_job_is_on():
    watch = StallWatch(floor=10)
    watch.start(2, now=0)
    watch.stop()
    assert tick_until(watch, 0, 100) is None
