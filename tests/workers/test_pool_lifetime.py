"""What goes wrong around jobs: a start, an end, a neighbour, a log. One sentence, nothing left behind."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from parallel_runtime.errors import PoolError
from parallel_runtime.requests.control import Cancelled
from tests.patience import SOON, wait_until
from workers.client import keeper as keeping
from workers.client import pool_registry
from workers.client.client import PoolClient
from workers.launch import PACK_ROOT, PoolSpec
from workers.leftovers import remove_leftovers
from workers.state_folder import PoolLog

from .conftest import FaultyPool, alive


@pytest.mark.slow
def test_a_slow_start_is_given_up_with_the_ranks_that_did_not_come(monkeypatch, tmp_path):
    monkeypatch.setenv("PARALLEL_DIT_LOGS", str(tmp_path))
    monkeypatch.setenv("PARALLEL_DIT_START_SECONDS", "1")
    client = PoolClient(PoolSpec("cpu", (0, 1)), "tests.workers.rank_that_never_comes")
    try:
        with pytest.raises(PoolError, match=r"Workers \[0, 1\] did not start within 1 seconds"):
            client.start()
    finally:
        client.close()


def test_ranks_that_cannot_start_say_why_in_the_log_that_the_error_names(monkeypatch, tmp_path):
    monkeypatch.setenv("PARALLEL_DIT_LOGS", str(tmp_path))
    client = PoolClient(PoolSpec("cpu", (0,)), "tests.workers.no_such_module")
    try:
        with pytest.raises(
            PoolError, match=r"Worker 0 \(process \d+\) ended with code 1 while the workers started"
        ) as caught:
            client.start()
        log = str(caught.value).rpartition("the log is ")[2].rstrip(".")
        assert "No module named tests.workers.no_such_module" in Path(log).read_text()
    finally:
        client.close()


@pytest.mark.long_but_for("0.5")
@pytest.mark.slow
@pytest.mark.parametrize("delay", [0.0, 0.5, 6.0])
def test_a_rank_killed_while_the_pool_starts_is_noticed_at_once(monkeypatch, tmp_path, delay):
    monkeypatch.setenv("PARALLEL_DIT_LOGS", str(tmp_path))
    client = PoolClient(PoolSpec("cpu", (0,)), "tests.workers.rank_that_never_comes")
    killed: list[float] = []

    def kill() -> bool:
        pool = client.pool
        children = psutil.Process(pool.pid).children() if pool is not None else []
        if children and not killed:
            time.sleep(delay)
            children[0].kill()
            killed.append(time.monotonic())
        return False

    try:
        with pytest.raises(PoolError, match=r"Worker 0 \(process \d+\) ended with code -9 while the workers started"):
            client.start(kill)
        assert time.monotonic() - killed[0] < SOON
    finally:
        client.close()


def test_a_pool_that_dies_again_and_again_is_replaced_ever_more_slowly(monkeypatch):
    now = [0.0]
    clock = SimpleNamespace(monotonic=lambda: now[0], sleep=lambda seconds: now.append(now.pop() + seconds))
    monkeypatch.setattr(keeping, "time", clock)
    keeper = PoolClient(PoolSpec("cpu", (0,))).keeper
    waits = []
    for deaths in (0, 1, 2, 3, 50):
        keeper.deaths, now[0] = deaths, 0.0
        keeper._back_off()
        waits.append(round(now[0]))
    assert waits == [0, 0, 1, 2, keeping.MAX_BACK_OFF_SECONDS]
    now[0] = 0.0
    keeper._should_cancel = lambda: now[0] > 0.2
    with pytest.raises(Cancelled):
        keeper._back_off()
    assert now[0] < 1


@pytest.mark.slow
def test_a_client_whose_devices_are_anothers_starts_no_pool_again_and_the_log_says_why(caplog):
    registry = pool_registry.PoolRegistry()
    first = registry.get(PoolSpec("cpu", (0, 1)))
    assert registry.get(PoolSpec("cpu", (0,))) is first  # a part of it
    assert registry.in_the_way(PoolSpec("cpu", (0,))) == registry.in_the_way(PoolSpec("cpu", (2,))) == []
    assert registry.in_the_way(PoolSpec("cpu", (1, 2))) == [first]
    other = registry.get(PoolSpec("cpu", (1, 2)))
    assert registry.clients == [other]
    assert "the pool on cpu:0,1 ends, as another one needs its devices: cpu:1,2." in caplog.text
    with pytest.raises(PoolError, match=r"^Other workers have taken devices of cpu:.*Queue the prompt again"):
        first.start()
    assert first.pool is None


@pytest.mark.slow
def test_a_pool_that_has_run_nothing_ends_after_a_while_and_the_next_prompt_starts_another(monkeypatch, tmp_path):
    monkeypatch.setenv("PARALLEL_DIT_LOGS", str(tmp_path))
    pool = FaultyPool(PoolClient(PoolSpec("cpu", (0,)), "tests.workers.faulty_rank"))
    try:
        assert not pool.client.close_unused(0.0)  # there is none
        pool.remember()
        assert not pool.client.close_unused(600.0)
        assert pool.client.close_unused(0.0)
        pool.check_gone()
        pool.check_works()
        assert not pool.client.close_unused(0.0)
    finally:
        pool.close()


@pytest.mark.slow
def test_two_pools_at_once_do_not_meet(faulty_pool):
    one, other = faulty_pool(), faulty_pool()
    threads = [threading.Thread(target=pool.sample, kwargs={"steps": 20}) for pool in (one, other)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    with pytest.raises(PoolError, match="Worker 0"):
        one.sample("exit 0 1")
    other.check_works()
    assert all(alive(process) for process in other.processes)
    one.check_works()


HOLDER = """
import sys, time
from workers.leftovers import make_folder
folder = make_folder()
print(folder.path, flush=True)
time.sleep(600)
"""


@pytest.mark.parametrize("namespace", [False, True])
def test_a_folder_stays_as_long_as_its_process_lives_and_goes_when_that_was_killed(namespace):
    apart = ["unshare", "--pid", "--fork", "--kill-child"] if namespace else []
    if namespace and (os.getuid() != 0 or shutil.which("unshare") is None):
        pytest.skip("needs root and the command unshare (Debian: util-linux) to make a PID namespace")
    holder = subprocess.Popen([*apart, sys.executable, "-c", HOLDER], cwd=PACK_ROOT, stdout=subprocess.PIPE, text=True)
    assert holder.stdout is not None
    folder = Path(holder.stdout.readline().strip())
    remove_leftovers()
    assert folder.exists()
    holder.kill()
    holder.wait()

    def gone() -> bool:
        remove_leftovers()
        return not folder.exists()

    assert wait_until(gone)  # the kernel takes a moment to end a namespace


@pytest.mark.slow
def test_the_folder_of_a_living_pool_stays_and_that_of_a_killed_one_goes(faulty_pool):
    pool, other = faulty_pool(1), faulty_pool(1)
    remove_leftovers()
    assert pool.pool.directory.exists()
    for process in pool.processes:
        process.kill()
    psutil.wait_procs(pool.processes, timeout=SOON)
    remove_leftovers()
    assert not pool.directories[0].exists()
    assert other.pool.directory.exists()


@pytest.mark.long_but_for("1")
@pytest.mark.slow
@pytest.mark.parametrize("forked", [0, 1])
def test_a_client_killed_in_the_middle_of_a_step_takes_the_pool_with_it(tmp_path, forked):
    script = textwrap.dedent(f"""
        import os, time
        from tests.workers.conftest import FaultyPool
        from workers.client.client import PoolClient
        from workers.launch import PoolSpec
        pool = FaultyPool(PoolClient(PoolSpec("cpu", (0, 1)), "tests.workers.faulty_rank"))
        pool.client.load(pool.model())
        pool.remember()
        for _ in range({forked}):  # as multiprocessing does: the child holds a copy of every descriptor
            if os.fork() == 0:
                time.sleep(600)
        print(pool.directories[0], *(process.pid for process in pool.processes), flush=True)
        pool.sample(steps=10000, on_progress=lambda *_: print("step", flush=True))
    """)
    environment = {**os.environ, "PARALLEL_DIT_LOGS": str(tmp_path)}
    client = subprocess.Popen(
        [sys.executable, "-c", script], cwd=PACK_ROOT, stdout=subprocess.PIPE, text=True, env=environment
    )
    assert client.stdout is not None
    directory, *pids = client.stdout.readline().split()
    assert client.stdout.readline() == "step\n"
    processes = [psutil.Process(int(pid)) for pid in pids]
    children = [child for child in psutil.Process(client.pid).children() if child.pid != processes[0].pid]
    assert len(children) == forked
    client.kill()
    client.wait()
    FaultyPool(None, processes, [Path(directory)]).check_gone()  # type: ignore[arg-type]
    for child in children:
        child.kill()


def test_a_full_disk_under_the_log_keeps_the_last_lines_in_memory(tmp_path):
    (tmp_path / "pool.log").symlink_to("/dev/full")
    log = PoolLog(tmp_path / "pool.log")
    log.write("one\ntwo")
    assert log.tail() == "one\ntwo"


@pytest.mark.long
def test_a_log_that_cannot_be_made_is_no_reason_to_fail(faulty_pool, tmp_path, monkeypatch):
    (tmp_path / "logs").write_text("a file where the folder should be")
    monkeypatch.setenv("PARALLEL_DIT_LOGS", str(tmp_path / "logs"))
    pool = faulty_pool()
    with pytest.raises(PoolError, match="planted fault"):
        pool.sample("raise 1 1")
    pool.check_works()
