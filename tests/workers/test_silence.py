"""A supervisor that does not answer is given up, a slow one is not, and a cancel waits for neither."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import threading
import time

import psutil
import pytest

from parallel_runtime.errors import PoolError
from parallel_runtime.requests.control import Cancelled
from tests.patience import SOON
from workers.client import life as silence
from workers.client import running_pool as running
from workers.client.life import ASK_SECONDS, GIVE_UP_SECONDS, Silence
from workers.launch import PACK_ROOT

from .conftest import FaultyPool, alive


def verdicts(quiet: Silence, start: float, end: float) -> list[tuple[float, str]]:
    """Tick twice a second; what came of it, and when."""
    times = [start + 0.5 * tick for tick in range(1, int((end - start) * 2) + 1)]
    return [(now, verdict) for now in times if (verdict := quiet.tick(now)) != "wait"]


def test_silence_asks_once_and_gives_up_within_30_seconds():
    found = verdicts(Silence(0.0), 0.0, 30.0)
    assert found[0] == (ASK_SECONDS + 0.5, "ask")
    assert found[1] == (GIVE_UP_SECONDS + 0.5, "give up")
    assert GIVE_UP_SECONDS < 30


def test_an_answer_begins_the_silence_anew():
    quiet = Silence(0.0)
    assert [verdict for _, verdict in verdicts(quiet, 0.0, 20.0)] == ["ask"]
    quiet.heard(20.0)
    assert verdicts(quiet, 20.0, 40.0) == [(25.5, "ask")]


def test_time_in_which_the_client_itself_stood_still_does_not_count():
    quiet = Silence(0.0)
    verdicts(quiet, 0.0, 20.0)
    assert quiet.tick(3600.0) == "wait"  # a laptop woke, or the client decoded a preview
    assert verdicts(quiet, 3600.0, 3620.0) == [(3605.5, "ask")]


@pytest.fixture
def impatient():
    """Silence of three seconds is enough; call it to wait as long as ever, as for a pool that starts."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(silence, "ASK_SECONDS", 0.5)
        patch.setattr(silence, "GIVE_UP_SECONDS", 3.0)
        yield patch.undo


def stop_supervisor(pool: FaultyPool) -> None:
    os.kill(pool.pool.pid, signal.SIGSTOP)


@pytest.mark.slow
def test_a_stopped_supervisor_is_told_of_given_up_and_replaced(faulty_pool, impatient):
    pool = faulty_pool(1)
    stopped = threading.Event()

    def stop(*_):
        if not stopped.is_set():
            stopped.set()
            stop_supervisor(pool)
            assert pool.pool.status(timeout=0.2).state == "silent"

    started = time.monotonic()
    with pytest.raises(PoolError, match=r"supervisor \(process \d+\) did not answer for \d+ seconds\. The next prompt"):
        pool.sample(steps=10_000, on_progress=stop)
    assert time.monotonic() - started < SOON
    pool.check_gone()
    impatient()
    pool.check_works()
    pool.remember()


@pytest.mark.slow
def test_a_supervisor_that_was_stopped_while_idle_is_found_by_the_next_job(faulty_pool, impatient):
    pool = faulty_pool(1)
    stop_supervisor(pool)
    with pytest.raises(PoolError, match="did not answer for"):
        pool.sample()
    pool.check_gone()


@pytest.mark.slow
def test_a_cancel_returns_although_the_supervisor_is_stopped_and_the_next_prompt_finds_a_fresh_pool(
    faulty_pool, impatient
):
    pool = faulty_pool(1)
    asked: list[float] = []

    def cancel() -> bool:
        if not asked:
            stop_supervisor(pool)
        asked.append(time.monotonic())
        return True

    with pytest.raises(Cancelled):
        pool.sample(steps=10_000, should_cancel=cancel)
    assert time.monotonic() - asked[0] < SOON
    pool.client.pool.settle()  # until the supervisor is given up
    impatient()
    pool.check_works()
    pool.check_gone()
    pool.remember()


@pytest.mark.slow
def test_a_cancel_returns_although_a_rank_hangs_and_the_next_prompt_pays_for_nothing_it_did(faulty_pool, monkeypatch):
    monkeypatch.setattr(running, "ABANDONED_SECONDS", 2.0)
    pool = faulty_pool(1)
    asked: list[float] = []

    def cancel() -> bool:
        asked.append(time.monotonic())
        return True

    with pytest.raises(Cancelled):
        pool.sample("hang 0 -1", should_cancel=cancel)
    assert time.monotonic() - asked[0] < SOON
    pool.check_works()  # it waits a moment for the abandoned job, then takes a fresh pool
    pool.check_gone()
    pool.remember()


@pytest.mark.slow
def test_free_park_and_a_lora_after_a_job_that_outlives_its_cancel_wait_for_a_while_and_hear_a_cancel(
    faulty_pool, monkeypatch
):
    monkeypatch.setattr(running, "ABANDONED_SECONDS", 4.0)
    pool = faulty_pool(1)
    with pytest.raises(Cancelled):
        pool.sample("hang 0 -1", should_cancel=lambda: True)
    for park in (False, True):
        with pytest.raises(Cancelled):
            pool.client.release(pool.model(), park, should_cancel=lambda: True)
    with pytest.raises(Cancelled):
        pool.client.load(pool.model(), should_cancel=lambda: True)
    assert pool.client.pool.life.state == "cancelled"
    started = time.monotonic()
    assert pool.client.release(pool.model()) == 0  # the pool ended, and all that it held
    assert time.monotonic() - started < SOON
    pool.check_works()
    pool.check_gone()
    pool.remember()


@pytest.mark.slow
def test_a_cancel_returns_while_a_rank_compiles_and_the_next_prompt_waits_for_what_it_needs_as_well(
    faulty_pool, monkeypatch
):
    monkeypatch.setattr(running, "ABANDONED_SECONDS", 2.0)
    pool = faulty_pool(1)
    compiles = threading.Event()
    asked: list[float] = []

    def cancel() -> bool:
        if pool.client.keeper.waits_for.reason == "compile":
            compiles.set()
        if compiles.is_set():
            asked.append(time.monotonic())
        return compiles.is_set()

    with pytest.raises(Cancelled):
        pool.sample("compile 0 0", should_cancel=cancel)
    assert time.monotonic() - asked[0] < SOON
    pool.check_works()
    assert time.monotonic() - asked[0] > 3  # longer than for a job that only goes on
    assert all(alive(process) for process in pool.processes)


@pytest.mark.slow
def test_a_job_that_outlives_its_cancel_keeps_its_pool_when_it_ends(faulty_pool, monkeypatch):
    monkeypatch.setattr(running, "CANCEL_SECONDS", 0.1)
    pool = faulty_pool(1)
    with pytest.raises(Cancelled):
        pool.sample("pause 0 0", should_cancel=lambda: True)
    state = pool.client.status().state
    assert state != "idle" or pool.pool.life.state != "cancelled"
    pool.check_works()
    assert all(alive(process) for process in pool.processes)


SCRIPT = """
import signal, sys, threading, time
signal.signal(signal.SIGINT, signal.default_int_handler)  # a background job is started with it ignored
from tests.workers.conftest import FaultyPool
from workers.client import pool_registry
from workers.launch import PoolSpec
from workers.client.pool_registry import _registry
from workers.client.client import PoolClient

client = PoolClient(PoolSpec("cpu", (0,)), "tests.workers.faulty_rank")
_registry.clients.append(client)
pool = FaultyPool(client)

def work():
    if sys.argv[1] == "starting":
        print("now", flush=True)
    pool.client.load(pool.model())
    pool.remember()
    print(*(process.pid for process in pool.processes), flush=True)
    if sys.argv[1] == "running":
        pool.sample(steps=100000, on_progress=lambda *_: print("now", flush=True))
    if sys.argv[1] == "loading":
        print("now", flush=True)
        pool.client.load(pool.model("hang 0 -1"))
    if sys.argv[1] == "idle":
        print("now", flush=True)

threading.Thread(target=work, daemon=True).start()  # as ComfyUI's worker is
while True:
    time.sleep(0.1)  # a signal just before a sleep does not end it: one long sleep would be slept to its end
"""


@pytest.mark.long_but_for("loading")
@pytest.mark.slow
@pytest.mark.parametrize("state", ["starting", "idle", "loading", "running"])
def test_ctrl_c_ends_the_client_and_its_pool_in_every_state(tmp_path, state):
    environment = {**os.environ, "PARALLEL_DIT_LOGS": str(tmp_path)}
    client = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(SCRIPT), state],
        cwd=PACK_ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        env=environment,
    )
    assert client.stdout is not None
    while client.stdout.readline() != "now\n":
        pass
    pool = psutil.Process(client.pid).children(recursive=True)
    client.send_signal(signal.SIGINT)
    # It gives its pool 5 s to end and 2 s to be killed; the rest is for the interpreter's own end on a busy machine.
    # What it must not wait for, the job of its thread, takes minutes.
    assert client.wait(120) != 0
    FaultyPool(None, pool).check_gone()  # type: ignore[arg-type]
