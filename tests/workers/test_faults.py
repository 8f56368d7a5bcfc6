"""Whatever fails, the artist reads one sentence, nothing is left behind, and the next job succeeds."""

from __future__ import annotations

import os
import re
import signal
import threading
import time
from functools import partial
from pathlib import Path

import psutil
import pytest

from parallel_runtime.errors import OutOfMemoryError, PoolError, RequestError
from parallel_runtime.requests.control import Cancelled
from tests.patience import SOON, wait_until

from .conftest import FaultyPool, alive

slow = partial(pytest.param, marks=pytest.mark.slow)
long = partial(pytest.param, marks=pytest.mark.long)


def die_in_a_job(pool: FaultyPool, fault: str) -> tuple[PoolError, float]:
    """Run a job that costs the pool; return its error and the seconds from the last step to it."""
    last = time.monotonic()

    def on_progress(*_):
        nonlocal last
        last = time.monotonic()

    with pytest.raises(PoolError) as caught:
        pool.sample(fault, on_progress=on_progress)
    return caught.value, time.monotonic() - last


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 1])
def test_an_error_in_prepare_on_one_rank_costs_the_job_only(faulty_pool, rank):
    pool = faulty_pool()
    before = pool.client.status().pids
    with pytest.raises(PoolError, match=rf"Worker {rank} failed with RuntimeError: planted fault\. The log"):
        pool.sample(f"raise {rank} -1")
    with pytest.raises(RequestError, match=r"^A planted refusal\. Do as it says\.$"):
        pool.sample(f"refuse {rank} -1")
    pool.check_works()
    assert pool.client.status().pids == before


@pytest.mark.slow
def test_a_rank_that_can_map_no_more_memory_is_told_of_and_replaced(faulty_pool):
    pool = faulty_pool()
    before = pool.client.pool.pid
    with pytest.raises(PoolError, match=r"Worker 1 failed with OSError: .*Cannot allocate memory"):
        pool.sample("unmapped 1 -1")
    assert wait_until(lambda: pool.client.status() is None)
    pool.check_works()
    assert pool.client.pool.pid != before
    pool.check_gone()
    pool.remember()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fault", "says"),
    [
        ("raise 1 2", r"Worker 1 failed with RuntimeError: planted fault\. The next prompt starts"),
        (
            "exit 1 2",
            r"Worker 1 \(process \d+\) ended in the middle of a job\. The next prompt starts fresh workers; the log is",
        ),
        long("raise 0 0", r"Worker 0 failed with RuntimeError: planted fault\. The next prompt starts"),
        slow("kill 0 1", r"Worker 0 \(process \d+\) ended in the middle of a job\."),
        long("segv 1 3", r"Worker 1 \(process \d+\) ended in the middle of a job\."),
        slow("kill 1 -1", r"Worker 1 \(process \d+\) ended in the middle of a job\."),
    ],
)
def test_a_failure_in_a_job_is_noticed_at_once_and_the_next_job_succeeds(faulty_pool, fault, says):
    pool = faulty_pool()
    error, seconds = die_in_a_job(pool, fault)
    assert seconds < SOON  # a rank that gets nowhere is found after a minute
    assert re.search(says, str(error)), str(error)
    pool.check_gone()
    pool.check_works()
    pool.remember()


@pytest.mark.parametrize(
    ("fault", "raised", "says"),
    [
        ("raise * 2", RequestError, r"^The model failed with RuntimeError: planted fault\. See whether"),
        ("oom * 1", OutOfMemoryError, r"^The CPU \(worker 0\) ran out of memory .* Use a smaller picture or batch"),
        slow("refuse * 0", RequestError, r"^A planted refusal\. Do as it says\.$"),
    ],
)
def test_an_error_of_all_ranks_alike_in_a_job_costs_the_job_only(faulty_pool, fault, raised, says):
    pool = faulty_pool()
    before = pool.client.status().pids
    with pytest.raises(raised, match=says):
        pool.sample(fault)
    with pytest.raises(RequestError, match="The model failed with RuntimeError: planted"):
        pool.forward((-1, -1))
    pool.check_works()
    assert pool.client.status().pids == before


@pytest.mark.long_but_for("exit 0 1")
@pytest.mark.slow
@pytest.mark.parametrize("fault", ["raise 1 1", "exit 0 1"])
def test_a_job_that_follows_at_once_is_not_given_to_the_dying_pool(faulty_pool, fault):
    pool = faulty_pool()
    die_in_a_job(pool, fault)
    pool.check_works()
    pool.check_gone()
    pool.remember()


@pytest.mark.slow  # the watch itself is in the first tier: test_stall.py, test_rank_control.py
@pytest.mark.parametrize("faults", [("stop 1 2", "hang 1 -1"), long(("hang 0 1",))], ids=", ".join)
def test_a_rank_that_gets_nowhere_is_stalled_within_its_bound_with_stacks_in_the_log(faulty_pool, monkeypatch, faults):
    monkeypatch.setenv("PARALLEL_DIT_STALL_SECONDS", "5")
    pool = faulty_pool()
    for fault in faults:  # one pool after the other
        pool.remember()
        error, seconds = die_in_a_job(pool, fault)
        assert seconds < SOON, fault  # a minute where nothing is set
        assert "made no progress for" in str(error), fault
        assert "with the stacks of all workers" in str(error), fault
        log = Path(str(error).rpartition("log with the stacks of all workers is ")[2].rstrip(".")).read_text()
        assert "most recent call first" in log, fault
        pool.check_gone()
    monkeypatch.delenv("PARALLEL_DIT_STALL_SECONDS")
    pool.check_works()


@pytest.mark.slow
def test_a_step_may_take_as_long_as_it_likes_while_its_blocks_finish(faulty_pool, monkeypatch):
    monkeypatch.setenv("PARALLEL_DIT_STALL_SECONDS", "5")
    pool = faulty_pool()
    pool.sample("crawl 0 1")  # rank 1 waits in a collective meanwhile
    assert all(alive(process) for process in pool.processes)


@pytest.mark.slow
def test_a_tree_that_slept_as_a_whole_did_not_stall(faulty_pool, monkeypatch):
    monkeypatch.setenv("PARALLEL_DIT_STALL_SECONDS", "5")
    pool = faulty_pool(1)
    slept = threading.Event()

    def sleep_and_wake(step, total, denoised):
        if step != 1 or slept.is_set():
            return
        slept.set()
        for process in pool.processes:
            process.suspend()
        time.sleep(8)
        for process in pool.processes:
            process.resume()

    pool.sample(steps=40, on_progress=sleep_and_wake)
    assert slept.is_set()
    pool.check_works()
    assert all(alive(process) for process in pool.processes)


@pytest.mark.slow
def test_the_supervisor_may_be_killed(faulty_pool):
    pool = faulty_pool(1)
    pid = pool.pool.pid
    killed = threading.Event()

    def kill(*_):
        if not killed.is_set():
            killed.set()
            os.kill(pid, signal.SIGKILL)

    started = time.monotonic()
    with pytest.raises(PoolError, match="The next prompt starts fresh workers"):
        pool.sample(steps=400, on_progress=kill)
    assert time.monotonic() - started < SOON
    pool.check_works()  # a killed supervisor cannot clean up; the next start does
    pool.check_gone()
    pool.remember()


@pytest.mark.slow
def test_a_rank_that_dies_while_the_pool_is_idle_costs_nothing_but_a_start(faulty_pool):
    pool = faulty_pool(1)
    os.kill(pool.client.status().pids[0], signal.SIGKILL)
    assert wait_until(lambda: pool.client.status() is None)
    pool.check_works()
    pool.check_gone()
    pool.remember()


@pytest.mark.slow
def test_a_request_that_comes_before_anybody_knows_that_the_pool_is_lost_goes_to_a_fresh_one(faulty_pool):
    pool = faulty_pool()
    status = pool.client.status()
    supervisor, rank = psutil.Process(pool.client.pool.pid), psutil.Process(status.pids[1])
    supervisor.suspend()  # it reads of the rank's end and of the request when it goes on, in this order
    rank.kill()
    assert wait_until(lambda: len(os.listdir(f"/proc/{rank.pid}/task")) <= 1)  # the last thread closes its socket
    assert wait_until(lambda: not alive(rank))
    threading.Timer(0.3, supervisor.resume).start()
    pool.check_works()
    assert pool.client.pool.pid != supervisor.pid
    pool.check_gone()
    pool.remember()


@pytest.mark.long_but_for("sample")
@pytest.mark.slow
@pytest.mark.parametrize("job", ["sample", slow("forward"), slow("load")])
def test_a_job_that_a_dying_rank_never_read_goes_to_a_fresh_pool(faulty_pool, job):
    pool = faulty_pool()
    run = {"load": lambda: pool.client.load(pool.model("fine too"))}.get(job, getattr(pool, job, None))
    run()  # a call is a step from now on
    before = pool.client.pool.pid
    rank = psutil.Process(pool.client.status().pids[1])
    rank.suspend()  # it ends, and what it has not read yet is there
    threads = list(Path(f"/proc/{rank.pid}/task").iterdir())  # which stop one by one
    assert wait_until(lambda: all(") T " in (thread / "stat").read_text() for thread in threads))
    threading.Timer(0.5, rank.kill).start()
    run()
    assert pool.client.pool.pid != before
    pool.check_gone()
    pool.remember()


@pytest.mark.slow
@pytest.mark.parametrize("waits", [(0, 3), long((1, 8, 20))], ids=str)
def test_a_job_that_comes_within_milliseconds_of_an_idle_ranks_end_is_not_lost(faulty_pool, waits):
    pool = faulty_pool()
    for milliseconds in waits:
        os.kill(pool.client.status().pids[1], signal.SIGKILL)
        time.sleep(milliseconds / 1000)
        pool.check_works()
        pool.client.keeper.deaths = 0  # no pause before the next
    pool.remember()


def test_out_of_memory_in_prepare_names_the_rank_and_what_would_fit_and_the_pool_lives(faulty_pool):
    pool = faulty_pool()
    before = pool.client.status().pids
    with pytest.raises(OutOfMemoryError) as caught:
        pool.client.load(pool.model("oom 1 -1"))
    assert "(worker 1) ran out of memory when it wanted 20.00 GiB more; " in str(caught.value)
    assert "GiB were free" in str(caught.value)
    assert "set devices to cpu:1" in str(caught.value)
    pool.check_works()
    assert pool.client.status().pids == before


@pytest.mark.slow
def test_out_of_memory_in_a_job_costs_the_pool_and_says_so(faulty_pool):
    pool = faulty_pool()
    with pytest.raises(OutOfMemoryError, match=r"\(worker 1\) ran out of memory.*smaller picture.*fresh workers"):
        pool.sample("oom 1 2")
    pool.check_gone()
    pool.check_works()


@pytest.mark.slow
def test_whoever_works_with_a_pool_that_is_stopped_reads_so(faulty_pool):
    pool = faulty_pool(1)
    stops: list[threading.Thread] = []

    def stop(*_):
        if not stops:
            stops.append(threading.Thread(target=pool.client.stop))
            stops[0].start()

    with pytest.raises(PoolError, match=r"^The workers were restarted while they worked for this\. Queue"):
        pool.sample("hang 0 1", on_progress=stop)
    stops[0].join()
    assert pool.client.pool is None
    pool.check_works()
    pool.remember()


@pytest.mark.slow
def test_who_raises_something_while_he_listens_leaves_a_job_that_ends_and_a_pool_that_works(faulty_pool):
    pool = faulty_pool(1)

    def listen(*_: object) -> None:
        raise InterruptedError  # as ComfyUI's bar does where its prompt was stopped

    with pytest.raises(InterruptedError):
        pool.sample(steps=100_000, on_progress=listen)
    pool.check_works()
    assert all(alive(process) for process in pool.processes)


@pytest.mark.slow  # a cancel of a real model is in the first tier: test_pool.py
@pytest.mark.parametrize("step", [0, 3])
def test_cancel_at_a_step_stops_all_ranks_there_and_keeps_them(faulty_pool, step):
    pool = faulty_pool(3)
    seen = []
    with pytest.raises(Cancelled):
        pool.sample(
            steps=500,
            on_progress=lambda now, *_: seen.append(now),
            should_cancel=lambda: bool(seen) and seen[-1] >= step,
        )
    assert seen[-1] < 400  # a busy machine takes a few steps to hear it
    pool.check_works()
    assert all(alive(process) for process in pool.processes)


def test_cancel_while_a_large_file_loads_is_heard_before_the_file_is_through(faulty_pool):
    pool = faulty_pool()
    started = time.monotonic()
    with pytest.raises(Cancelled):
        pool.client.load(pool.model("slow 1 -1"), should_cancel=lambda: time.monotonic() - started > 0.5)
    assert time.monotonic() - started < 9  # the file takes 10
    pool.check_works()
    assert all(alive(process) for process in pool.processes)


@pytest.mark.slow
def test_a_second_prompt_waits_its_turn_in_every_state(faulty_pool):
    pool = faulty_pool(1)
    pool.client.close()
    errors: list[BaseException] = []

    def job(work):
        try:
            work()
        except BaseException as error:  # noqa: BLE001 - handed to the main thread
            errors.append(error)

    def while_(state, first, second):
        threads = [threading.Thread(target=job, args=(first,))]
        threads[0].start()
        deadline = time.monotonic() + 120
        while time.monotonic() < deadline and threads[0].is_alive():
            status = pool.client.status()
            if status is not None and status.state == state:
                break
            time.sleep(0.01)
        threads.append(threading.Thread(target=job, args=(second,)))
        threads[1].start()
        for thread in threads:
            thread.join(120)
            assert not thread.is_alive()

    while_("starting", pool.check_works, pool.check_works)
    while_("preparing", lambda: pool.client.load(pool.model("pause 0 -1")), pool.check_works)
    while_("running", lambda: pool.sample(steps=50), pool.check_works)
    assert errors == []
    while_("running", lambda: pool.sample("exit 0 40", steps=50), pool.check_works)
    assert [type(error) for error in errors] == [PoolError]  # the first job's own; the second found a fresh pool
