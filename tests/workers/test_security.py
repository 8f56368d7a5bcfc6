"""Nobody but this pool's own ranks is heard, and nothing listens where others could knock."""

from __future__ import annotations

import os
import socket
import stat
import subprocess
import sys

import psutil
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from parallel_runtime.errors import PoolError
from parallel_runtime.requests.requests import Finished
from tests.patience import wait_until
from workers.supervisor.jobs import ActiveJob
from workers.wire.frames import PREFIX, Frame, encode_header, encode_prefix
from workers.wire.protocol import VERSION, Done, ErrorInfo, Failed, Heartbeat, Hello, Online, Ready

from .conftest import FaultyPool


def tree(pool: FaultyPool) -> list[psutil.Process]:
    supervisor = psutil.Process(pool.pool.pid)
    return [supervisor, *supervisor.children(recursive=True)]


def knock(pool: FaultyPool, data: bytes) -> bytes:
    """Connect to the socket of the ranks, say something, return what comes back before the other side hangs up."""
    with socket.socket(socket.AF_UNIX) as stranger:
        stranger.settimeout(60)
        stranger.connect(str(pool.pool.directory / "ranks.socket"))
        try:
            stranger.sendall(data)
            stranger.shutdown(socket.SHUT_WR)
            return stranger.recv(100)
        except ConnectionError:
            return b""


@pytest.mark.slow
def test_everything_of_the_pool_listens_on_loopback_only(faulty_pool):
    pool = faulty_pool(3)
    pool.check_works()
    listening = [
        connection.laddr.ip
        for process in tree(pool)
        for connection in process.net_connections("inet")
        if connection.status == psutil.CONN_LISTEN
    ]
    assert listening  # gloo does listen
    assert {address for address in listening if not address.startswith("127.")} == set()


def test_the_pools_folder_is_for_its_user_alone(faulty_pool):
    mode = faulty_pool(1).pool.directory.stat().st_mode
    assert stat.S_IMODE(mode) == 0o700


@pytest.mark.skipif(os.getuid() != 0, reason="only root can act as another user")
def test_another_user_is_refused_even_where_the_folder_would_let_him_in(faulty_pool):
    pool = faulty_pool(1)
    path = pool.pool.directory / "ranks.socket"
    pool.pool.directory.chmod(0o755)
    path.chmod(0o777)
    header = encode_header(Hello(0))
    script = (
        "import os, socket, sys; os.setgid(65534); os.setuid(65534); s = socket.socket(socket.AF_UNIX);"
        "s.connect(sys.argv[1]); s.sendall(bytes.fromhex(sys.argv[2])); s.settimeout(60); print(len(s.recv(10)))"
    )
    words = (encode_prefix(header, 0) + header).hex()
    answer = subprocess.run([sys.executable, "-I", "-c", script, str(path), words], capture_output=True, text=True)
    assert answer.stdout.strip() in ("0", ""), answer  # hung up on
    pool.check_works()
    assert "refused a connection from user 65534" in pool.pool.log.read_text()
    pool.client.close()  # it is open to others now


@pytest.mark.parametrize("message", [Hello(0), Hello(7), Online(0, "cpu"), Heartbeat(0, 1), Ready(1, 0), Hello(1)])
def test_a_process_that_the_pool_did_not_start_is_no_rank_whatever_it_says(faulty_pool, message):
    pool = faulty_pool(1)
    header = encode_header(message)
    assert knock(pool, encode_prefix(header, 0) + header) == b""
    pool.check_works()


@pytest.mark.slow
def test_no_bytes_on_the_ranks_socket_disturb_the_pool(faulty_pool):
    pool = faulty_pool(1)
    real = encode_header(Hello(0))
    prefixes = st.builds(
        PREFIX.pack,
        st.sampled_from([b"PDiT", b"GET ", b"\x80\x04\x95."]),
        st.sampled_from([VERSION, 0, 65535]),
        st.integers(0, 2**32 - 1),
        st.integers(0, 2**64 - 1),
    )

    @settings(max_examples=1500, deadline=None, suppress_health_check=list(HealthCheck))
    @given(st.one_of(st.binary(max_size=300), prefixes, st.tuples(prefixes, st.binary(max_size=99)).map(b"".join)))
    def attack(data):
        assert knock(pool, data) == b""

    supervisor = tree(pool)[0]
    knock(pool, real)
    descriptors, memory = supervisor.num_fds(), supervisor.memory_info().rss
    attack()
    assert wait_until(lambda: supervisor.num_fds() <= descriptors)
    assert supervisor.memory_info().rss - memory < 32 << 20  # a promised payload is not taken for true
    pool.check_works()


@pytest.mark.long_but_for("garbage that is long enough to be a prefix")
@pytest.mark.slow
@pytest.mark.parametrize(
    "data",
    [
        b"garbage that is long enough to be a prefix",
        PREFIX.pack(b"PDiT", VERSION, 2**32 - 1, 0),
        PREFIX.pack(b"PDiT", VERSION + 1, 0, 0),
        PREFIX.pack(b"PDiT", VERSION, 100, 0) + b"half a frame",
    ],
)
def test_garbage_from_the_client_ends_the_pool_with_a_typed_error(faulty_pool, data):
    pool = faulty_pool(1)
    running = pool.pool
    running._connection._socket.sendall(data)
    if data.endswith(b"half a frame"):
        running._connection._socket.shutdown(socket.SHUT_WR)
    assert wait_until(lambda: not running.life.alive)
    assert isinstance(running.death(), PoolError)
    pool.check_gone()
    pool.check_works()


def test_late_answers_of_another_job_are_dropped():
    job = ActiveJob(2, world_size=2)
    for message in (
        Ready(1, 0),
        Failed(1, 1, ErrorInfo("PoolError", "Old.", "")),
        Done(2, 0, Finished()),
    ):
        job.answer(Frame(message, b"", None))
    assert job.outcome == "open"
    assert not job.failed
    assert not job.done
