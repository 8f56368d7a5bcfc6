"""A pool that cannot start says why on the node, in a typed error, and its log is there."""

from __future__ import annotations

import errno
import os
import re
import socket
import tempfile
import threading
from pathlib import Path

import pytest

from parallel_runtime.errors import ConfigurationError, PoolError
from workers import leftovers
from workers.client import supervisor_process
from workers.client.client import PoolClient
from workers.launch import PoolSpec, read_seconds
from workers.state_folder import PoolLog, begin_log, last_line, state_directory


@pytest.fixture
def failed_start(monkeypatch, tmp_path):
    """Start a pool that cannot; return its error. Nothing of it may be left."""
    monkeypatch.setenv("PARALLEL_DIT_LOGS", str(tmp_path / "logs"))
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))

    def start(hosts: int = 1) -> str:
        client = PoolClient(PoolSpec("cpu", (0,), hosts), "tests.workers.faulty_rank")
        try:
            with pytest.raises(PoolError) as caught:
                client.start()
        finally:
            client.close()
        assert list(temporary.iterdir()) == []
        return str(caught.value)

    return start


@pytest.mark.parametrize("name", ["PARALLEL_DIT_START_SECONDS", "PARALLEL_DIT_STALL_SECONDS"])
def test_a_setting_that_is_no_number_is_named(failed_start, monkeypatch, name):
    monkeypatch.setenv(name, "soon")
    assert failed_start().startswith(f"The environment variable {name} is 'soon', which is no time in seconds. Set it")


@pytest.mark.parametrize("text", ["nan", "inf", "-1", "0", "1e999", "x" * 5000])
def test_a_time_is_a_finite_number_above_0(text):
    with pytest.raises(ConfigurationError, match="is no time in seconds"):
        read_seconds({"NAME": text}, "NAME", 1.0)


def test_a_port_that_is_taken_is_named(failed_start, monkeypatch):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        where = f"127.0.0.1:{taken.getsockname()[1]}"
        monkeypatch.setenv("PARALLEL_DIT_LISTEN", where)
        assert failed_start(hosts=2).startswith(f"Cannot listen on {where}: Address already in use. Set $PARALLEL")


def test_an_address_of_another_machine_is_named(failed_start, monkeypatch):
    monkeypatch.setenv("PARALLEL_DIT_LISTEN", "192.0.2.1:29600")
    assert failed_start(hosts=2).startswith("No network interface of this host has the address 192.0.2.1.")


def test_a_host_name_is_looked_up(failed_start, monkeypatch):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        monkeypatch.setenv("PARALLEL_DIT_LISTEN", f"localhost:{port}")
        assert failed_start(hosts=2).startswith(f"Cannot listen on 127.0.0.1:{port}")


def test_what_python_itself_says_reaches_the_node_and_the_log(failed_start, monkeypatch):
    real = supervisor_process.subprocess.Popen

    def broken(command, **options):
        return real([command[0], "-c", "import no_such_package"], **options)

    monkeypatch.setattr(supervisor_process.subprocess, "Popen", broken)
    error = failed_start()
    assert "ended with code 1 and said: ModuleNotFoundError: No module named 'no_such_package'." in error
    log = re.search(r"the log is (.*)\.$", error)
    assert log is not None
    assert "no_such_package" in Path(log[1]).read_text()


def test_a_log_that_could_not_be_written_is_not_named(failed_start, monkeypatch, tmp_path):
    (tmp_path / "logs").write_text("a file where the folder should be")
    monkeypatch.setattr(supervisor_process.subprocess, "Popen", lambda command, **options: _Ended())
    assert failed_start().endswith(f"no log could be written in {tmp_path / 'logs'}.")


class _Ended:
    """A process that has ended."""

    pid = returncode = 1

    def poll(self) -> int:
        return 1

    def kill(self) -> None:
        """There is nothing left to end."""

    def wait(self, timeout: float | None = None) -> int:
        return 1


def test_too_many_processes_or_descriptors_are_a_typed_error(failed_start, monkeypatch):
    def refuse(command, **options):
        raise OSError(errno.EAGAIN, os.strerror(errno.EAGAIN))

    monkeypatch.setattr(supervisor_process.subprocess, "Popen", refuse)
    assert failed_start().startswith("The workers' supervisor could not be started: Resource temporarily unavailable.")


def test_no_room_for_temporary_files_is_a_typed_error(monkeypatch):
    def refuse(prefix):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(leftovers.tempfile, "mkdtemp", refuse)
    with pytest.raises(PoolError, match=r"could be made in .*: No space left on device\. Make room there"):
        PoolClient(PoolSpec("cpu", (0,))).start()


def test_a_folder_that_can_be_made_and_not_filled_is_a_typed_error(failed_start, monkeypatch):
    def refuse(path, data):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(Path, "write_bytes", refuse)
    assert re.search(r"could be made in .*: No space left on device\. Make room there", failed_start())


def test_a_log_is_for_its_user_alone_to_write_whatever_the_umask(tmp_path):
    path = tmp_path / "logs" / "pool-x.log"
    before = os.umask(0)
    try:
        begun = begin_log(path)
        assert begun is not None
        begun.close()
        log = PoolLog(path)
        log.write("x" * 100)
        log._handler.doRollover()
        log.write("y" * 100)
    finally:
        os.umask(before)
    made = [path, path.with_name("pool-x.log.1")]
    assert [(each.stat().st_mode & 0o777, each.read_text()[-2]) for each in made] == [(0o644, "y"), (0o644, "x")]


def test_a_user_without_a_home_is_a_typed_error(monkeypatch):
    def nobody():
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("XDG_STATE_HOME", raising=False)
    monkeypatch.setattr(Path, "home", nobody)
    with pytest.raises(ConfigurationError, match="has no home folder. Set the environment variable HOME"):
        state_directory()


@pytest.mark.slow
def test_a_pool_starts_below_a_folder_with_a_long_path(faulty_pool, monkeypatch, tmp_path):
    long = tmp_path / ("x" * 120)
    long.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(long))
    made = faulty_pool(1)
    assert made.pool.directory.parent == long
    made.check_works()


def test_the_logs_of_the_last_pools_are_kept(tmp_path):
    for number in range(30):
        log = tmp_path / f"pool-{number:02}.log"
        for file in (log, log.with_name(f"{log.name}.1")):
            file.write_text("x")
        os.utime(log, (number, number))
    (tmp_path / "other.log").write_text("not ours")
    begun = begin_log(tmp_path / "pool-new.log")
    assert begun is not None
    begun.close()
    kept = {"pool-new.log", "other.log"} | {f"pool-{n}.log{end}" for n in range(11, 30) for end in ("", ".1")}
    assert {path.name for path in tmp_path.iterdir()} == kept


def test_the_last_line_of_a_log_is_found_whatever_is_in_it(tmp_path):
    log = tmp_path / "log"
    assert last_line(log) == ""
    log.write_bytes(b"x" * (1 << 20) + b"\nthe cause\xff\n\n")
    assert last_line(log) == "the cause\ufffd"


def test_threads_that_start_at_once_keep_each_others_folders(monkeypatch, tmp_path):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    made: list[leftovers.PrivateFolder] = []

    def work():
        for _ in range(20):
            made.append(leftovers.make_folder())

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(made) == 80
    assert all(folder.path.exists() for folder in made)
    for folder in made:
        folder.close()
    assert not any(folder.path.exists() for folder in made)
