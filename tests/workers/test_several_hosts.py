"""A pool over two hosts: two network namespaces of this machine, joined by a cable that can be pulled."""

from __future__ import annotations

import contextlib
import ipaddress
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from parallel_runtime.errors import ConfigurationError
from tests.patience import SOON, wait_until
from workers.launch import PACK_ROOT, read_meeting
from workers.rank.joining import make_environment

MAIN, OTHER = "10.213.7.1", "10.213.7.2"
PORT = 29613

CLIENT = """
import sys, threading, time
from parallel_runtime.errors import ParallelError
from tests.workers.conftest import FaultyPool
from tests.workers.loops import make_loop
from parallel_runtime.requests.control import Cancelled
from workers.client.client import PoolClient
from workers.launch import PoolSpec

pool = FaultyPool(PoolClient(PoolSpec("cpu", (0,), 2), "tests.workers.faulty_rank"))
for line in sys.stdin:
    try:
        if line.strip() == "load":
            pool.client.load(pool.model())
            print("loaded", pool.client.status().pids, flush=True)
        elif line.strip() == "sample":
            print("sampled", pool.sample(steps=3).flatten().tolist(), flush=True)
        elif line.strip() == "long":
            pool.sample(steps=2000, on_progress=lambda step, *_: print("step", flush=True) if step == 3 else None)
        elif line.strip() == "cancelled":
            stop = threading.Event()
            try:
                pool.sample(steps=2000, on_progress=lambda step, *_: stop.set(), should_cancel=stop.is_set)
            except Cancelled:
                pool.client.pool.settle()
                print("cancelled", pool.client.pool.life.state, flush=True)
        elif line.strip() == "restart":
            pool.client.stop()
            pool.client.start()
            print("restarted", flush=True)
        elif line.strip() == "refused":
            pool.client.load(pool.model("raise 1 -1"))
        elif line.strip() == "broken":
            pool.sample("raise 1 2")
    except ParallelError as error:
        print("error", error, flush=True)
pool.client.close()
print("closed", flush=True)
"""


PICTURE = """
import pathlib, sys, torch
from parallel_runtime.config import ParallelConfig
from tests.tiny_flux import write_diffusers_folder
from tests.workers.loops import make_loop
from workers.client.client import PoolClient
from workers.client.node_requests import ModelRequest
from workers.launch import PoolSpec

path = str(write_diffusers_folder(pathlib.Path(sys.argv[1]) / "tiny"))
draw = torch.Generator().manual_seed(0)
text = {"context": torch.randn(1, 5, 64, generator=draw), "y": torch.randn(1, 32, generator=draw)}
text["guidance"] = torch.full((1,), 3.5)
x = torch.randn(1, 16, 6, 8, generator=draw)

def picture(hosts):
    client = PoolClient(PoolSpec("cpu", (0,), hosts))
    model = ModelRequest(path, "float32", ParallelConfig(devices="cpu:1", hosts=hosts))
    latent = client.sample(model, make_loop("euler", torch.linspace(1, 0, 5), x, {0: text}, 1.0))
    calls = [client.forward(model, x, torch.tensor([sigma]), text) for sigma in (0.5, 0.4)]
    client.release(model, park=True)
    calls.append(client.forward(model, x, torch.tensor([0.4]), text))
    client.close()
    return [latent, *calls]

worst = max(float((one - other).abs().max() / other.abs().max()) for one, other in zip(picture(2), picture(1)))
print("difference", worst, flush=True)
"""


def run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True)


@pytest.fixture
def cable():
    """Namespaces `one` and `two`, a veth pair between them; yields their names."""
    if os.getuid() != 0 or shutil.which("ip") is None:
        pytest.skip("needs root and the command ip (Debian: iproute2) to make network namespaces")
    one, two = f"pdit{os.getpid()}a", f"pdit{os.getpid()}b"
    try:
        run("ip", "netns", "add", one)
    except subprocess.CalledProcessError as error:
        pytest.skip(f"network namespaces cannot be made here: {error.stderr.decode().strip()}")
    try:
        run("ip", "netns", "add", two)
        run("ip", "link", "add", "cable0", "netns", one, "type", "veth", "peer", "name", "cable1", "netns", two)
        for namespace, link, address in ((one, "cable0", MAIN), (two, "cable1", OTHER)):
            run("ip", "-n", namespace, "addr", "add", f"{address}/24", "dev", link)
            run("ip", "-n", namespace, "link", "set", link, "up")
            run("ip", "-n", namespace, "link", "set", "lo", "up")
        yield one, two
    finally:
        for namespace in (one, two):
            subprocess.run(["ip", "netns", "del", namespace], capture_output=True)


class Process:
    """A process in a namespace, talked to by lines."""

    def __init__(self, namespace: str, arguments: list[str], environment: dict[str, str]):
        self.process = subprocess.Popen(
            ["ip", "netns", "exec", namespace, *arguments],
            cwd=PACK_ROOT,
            env={**os.environ, "PYTHONUNBUFFERED": "1", **environment},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,  # what it writes to stderr is in the report of a test that fails
            text=True,
            start_new_session=True,
        )
        self.lines: list[str] = []
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.append(line.strip())

    def say(self, line: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(line + "\n")
        self.process.stdin.flush()

    def expect(self, beginning: str) -> str:
        def found() -> list[str]:
            return [line for line in self.lines if line.startswith(beginning)]

        # A busy machine starts two pools of two hosts in three minutes.
        wait_until(lambda: found() or self.process.poll() is not None, 300)
        self._reader.join(SOON if self.process.poll() is not None else 0)
        if not found() and self.process.poll() is None:
            raise TimeoutError(f"no line {beginning!r}, but {self.lines}")
        assert found(), f"it ended without a line {beginning!r}, but with {self.lines}"
        line = found()[0]
        self.lines.remove(line)
        return line

    def end(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGTERM)
        try:
            self.process.wait(SOON)
        except subprocess.TimeoutExpired:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()


@pytest.fixture
def machines(cable, tmp_path):
    """Functions that run Python on the first machine, and torchrun on the other one, again and again."""
    one, two = cable
    environment = {"PARALLEL_DIT_LOGS": str(tmp_path / "logs"), "PARALLEL_DIT_LISTEN": f"{MAIN}:{PORT}"}
    started: list[Process] = []

    def first(*arguments: str) -> Process:
        started.append(Process(one, [sys.executable, *arguments], environment))
        return started[-1]

    def join(ranks: int = 1, module: str = "tests.workers.faulty_rank") -> Process:
        torchrun = f"{sys.executable} -m torch.distributed.run --nnodes=2 --node-rank=1 --nproc-per-node={ranks}"
        command = f"{torchrun} --rdzv-endpoint={MAIN}:{PORT} -m {module}"
        started.append(Process(two, ["bash", "-c", f"while sleep 1; do echo began; {command}; done"], {}))
        return started[-1]

    yield first, join
    for process in reversed(started):
        process.end()


@pytest.fixture
def hosts(machines):
    """(client of a pool of faulty ranks on the first machine, function that has the other one join)."""
    first, join = machines
    return first("-c", CLIENT), join


def listening(process: Process) -> set[tuple[str, int]]:
    """Where anything in a process's namespace listens, but for loopback."""
    found = set()
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/{process.process.pid}/net/{table}").read_text().splitlines()[1:]:
            local, state = line.split()[1], line.split()[3]
            address, _, port = local.partition(":")
            if state == "0A":  # TCP_LISTEN
                found.add((str(ipaddress.ip_address(bytes.fromhex(address)[::-1])), int(port, 16)))
    return {(address, port) for address, port in found if not address.startswith("127.")}


@pytest.mark.long
def test_two_hosts_sample_together_one_pool_after_the_other(hosts):
    client, join = hosts
    other = join()
    client.say("load")
    client.expect("loaded")
    client.say("sample")
    assert client.expect("sampled") == "sampled [0.0, 1.0, 2.0, 3.0, 4.0, 5.0]"
    # torchrun's store is on every interface, gloo on the one that leads to the others.
    assert {address for address, _ in listening(client) | listening(other)} <= {MAIN, OTHER, "::", "0.0.0.0"}
    client.say("cancelled")
    assert client.expect("cancelled") == "cancelled idle"
    client.say("sample")
    client.expect("sampled")
    client.say("restart")
    client.expect("restarted")
    client.say("sample")
    assert client.expect("sampled") == "sampled [0.0, 1.0, 2.0, 3.0, 4.0, 5.0]"
    assert sum(line == "began" for line in other.lines) == 2
    client.process.stdin.close()
    client.expect("closed")


@pytest.mark.slow
def test_two_hosts_give_the_picture_of_one(machines, tmp_path):
    first, join = machines
    client = first("-c", PICTURE, str(tmp_path))
    join(module="workers.rank")
    assert float(client.expect("difference").split()[1]) < 1e-5


@pytest.mark.long_but_for("killed")
@pytest.mark.slow
@pytest.mark.parametrize("how", ["killed", "unplugged"])
def test_faults_on_the_other_host_are_told_by_its_rank_and_one_that_drops_off_is_found_again(hosts, cable, how):
    client, join = hosts
    other = join()
    client.say("load")
    client.expect("loaded")
    client.say("refused")  # which costs the job alone
    assert "Worker 1 failed with RuntimeError: planted fault" in client.expect("error")
    client.say("sample")
    client.expect("sampled")
    assert sum(line == "began" for line in other.lines) == 1
    client.say("long")
    client.expect("step")
    started = time.monotonic()
    if how == "killed":
        other.end()
    else:
        run("ip", "-n", cable[1], "link", "set", "cable1", "down")
    error = client.expect("error")
    assert time.monotonic() - started < 2 * SOON  # an unplugged one is noticed after fifteen seconds
    assert f"({OTHER}) was lost in the middle of a job. The next prompt starts fresh workers" in error
    if how == "killed":
        join()
    else:
        run("ip", "-n", cable[1], "link", "set", "cable1", "up")
    client.say("load")
    client.expect("loaded")
    client.say("sample")
    assert client.expect("sampled") == "sampled [0.0, 1.0, 2.0, 3.0, 4.0, 5.0]"
    client.say("broken")
    assert "Worker 1 failed with RuntimeError: planted fault" in client.expect("error")


@pytest.mark.long
def test_a_host_that_brings_another_number_of_ranks_is_named(hosts):
    client, join = hosts
    join(2)
    client.say("load")
    assert "The hosts bring 3 workers, not 2. Give 1 to --nproc-per-node on each" in client.expect("error")


def test_ranks_elsewhere_make_their_environment_themselves(tmp_path):
    torchrun = {"RANK": "3", "LOCAL_RANK": "1", "WORLD_SIZE": "6", "LOCAL_WORLD_SIZE": "2", "GROUP_WORLD_SIZE": "3"}
    error_file = tmp_path / "attempt_0" / "1" / "error.json"
    environment = {
        **torchrun,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "1",
        "TORCHELASTIC_ERROR_FILE": str(error_file),
    }
    assert "PARALLEL_DIT_POOL" not in environment  # no supervisor has started it
    make_environment(environment)
    assert torchrun.items() <= environment.items()
    assert environment["PARALLEL_DIT_DEVICES"] == "cpu:0,1*3"
    assert environment["PARALLEL_DIT_POOL"] == str(tmp_path / "attempt_0")
    assert environment["GLOO_SOCKET_IFNAME"] == environment["NCCL_SOCKET_IFNAME"] == "lo"


@pytest.mark.parametrize("text", ["10.0.0.1", "10.0.0.1:0", "10.0.0.1:70000", "http://x:1"])
def test_an_address_that_is_none_is_refused(text):
    with pytest.raises(ConfigurationError, match=r"is not an address with a port.*10\.0\.0\.1:29600"):
        read_meeting({"PARALLEL_DIT_LISTEN": text})


def test_several_hosts_without_their_settings_are_an_error_of_the_configuration(monkeypatch):
    from parallel_runtime.config import ParallelConfig
    from workers.client.pool_registry import get_pool

    monkeypatch.delenv("PARALLEL_DIT_LISTEN", raising=False)
    with pytest.raises(ConfigurationError, match=r"several hosts, but \$PARALLEL_DIT_LISTEN is not set"):
        get_pool(ParallelConfig(devices="cpu:1", hosts=2))
