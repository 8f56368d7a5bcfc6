"""The doctor's real check: right, bounded in time, on the loopback interface only, and gone afterwards."""

from __future__ import annotations

import ipaddress
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
import torch
import torch.distributed as dist

from tests.patience import SOON, wait_until
from workers.doctor.link_check import check_links
from workers.doctor.link_rank import WrongResult, verify
from workers.doctor.report import find
from workers.launch import PACK_ROOT, PoolSpec
from workers.leftovers import remove_leftovers

from .machines import machine

TWO = PoolSpec("cpu", (0, 1))
MARK = "DOCTOR_TEST_MARK"
FAULTY = "tests.workers.faulty_link_rank"

DOCTOR_WITHOUT_FACTS = """
import sys
from tests.workers.machines import machine
from workers.doctor import __main__ as doctor
doctor.look = machine
sys.exit(doctor.main())
"""


class Traces:
    """What a check leaves: processes with our mark in their environment, files in the temporary folder."""

    def __init__(self, mark: str, folder: Path):
        self.mark = mark
        self.folder = folder

    def processes(self) -> list[psutil.Process]:
        found = []
        for process in psutil.process_iter():
            try:
                marked = process.pid != os.getpid() and process.environ().get(MARK) == self.mark
                if marked and process.status() != psutil.STATUS_ZOMBIE:
                    found.append(process)
            except psutil.Error:
                continue
        return found

    def ranks(self) -> list[psutil.Process]:
        ranks = []
        for process in self.processes():
            try:
                if "workers.doctor.link_rank" in process.cmdline():
                    ranks.append(process)
            except psutil.Error:
                continue
        return ranks

    def left(self) -> list[object]:
        # os.walk passes over what vanishes while it looks.
        found = [Path(folder, name) for folder, below, files in os.walk(self.folder) for name in (*below, *files)]
        return [*self.processes(), *found]


@pytest.fixture
def traces(tmp_path, monkeypatch) -> Iterator[Traces]:
    folder = tmp_path / "tmp"
    folder.mkdir()
    mark = uuid.uuid4().hex
    monkeypatch.setenv(MARK, mark)
    monkeypatch.setenv("TMPDIR", str(folder))
    monkeypatch.setattr(tempfile, "tempdir", None)
    traces = Traces(mark, folder)
    yield traces
    for process in traces.processes():
        process.kill()


@pytest.mark.slow
def test_the_whole_doctor_passes_here_listens_on_loopback_only_and_leaves_nothing(traces):
    command = [sys.executable, "-m", "workers.doctor", "--devices", "cpu:2", "--json"]
    addresses = set()
    with subprocess.Popen(command, cwd=PACK_ROOT, stdout=subprocess.PIPE, text=True) as process:
        while process.poll() is None:
            for rank in traces.processes():
                try:
                    listening = [c.laddr.ip for c in rank.net_connections("inet") if c.status == psutil.CONN_LISTEN]
                except psutil.Error:
                    continue
                addresses |= set(listening)
            time.sleep(0.02)
        assert process.stdout is not None
        report = json.loads(process.stdout.read())
    assert process.returncode == 0, report["text"]
    assert report["works"]
    assert re.search(
        r"gloo on cpu:0,1: the right numbers\n +[\d.]+ GB/s with 8 MB, \d+ µs with 4 bytes", report["text"]
    )
    assert addresses  # gloo's ranks do listen for each other
    assert all(ipaddress.ip_address(address).is_loopback for address in addresses), addresses
    assert traces.left() == []


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fault", "says"),
    [
        ("raise", "Rank 1 failed while about to fail: RuntimeError: NCCL error: unhandled system error Last error: no"),
        pytest.param("exit", "Rank 1 ended with exit code 7 while about to fail", marks=pytest.mark.long),
        ("kill", "Rank 1 was ended by signal 9 while about to fail"),
    ],
)
def test_a_rank_that_fails_is_named_with_how_and_where(traces, monkeypatch, fault, says):
    monkeypatch.setenv("DOCTOR_FAULT", fault)
    link = check_links(TWO, 120, FAULTY)
    assert link.failure is not None
    assert says in link.failure
    assert ("unhandled system error" in link.output) == (fault == "raise")
    assert find(TWO, machine(), link)[0].level == "broken"
    assert traces.left() == []


@pytest.mark.long_but_for("stop")
@pytest.mark.slow
@pytest.mark.parametrize("fault", ["hang", "stop"])
def test_ranks_that_hang_are_ended_in_time_and_the_report_says_where_each_was(traces, monkeypatch, fault):
    monkeypatch.setenv("DOCTOR_FAULT", fault)
    start = time.monotonic()
    link = check_links(TWO, 20, FAULTY)
    assert time.monotonic() - start < 20 + SOON
    assert link.failure is not None
    assert link.failure.startswith("The collectives did not finish within 20 seconds: rank 0 was ")
    assert link.failure.endswith("; rank 1 was about to fail")
    assert traces.left() == []


@pytest.mark.slow
@pytest.mark.parametrize(
    ("number", "code"),
    [
        (signal.SIGINT, 130),
        pytest.param(signal.SIGTERM, 143, marks=pytest.mark.long),
        (signal.SIGKILL, -signal.SIGKILL),
    ],
)
def test_however_the_doctor_is_ended_its_ranks_and_its_folder_go_with_it(traces, number, code):
    def heed():  # a shell's background jobs ignore it, and what they start as well
        signal.signal(signal.SIGINT, signal.SIG_DFL)

    process = subprocess.Popen([sys.executable, "-c", DOCTOR_WITHOUT_FACTS], cwd=PACK_ROOT, preexec_fn=heed)
    assert wait_until(lambda: len(traces.ranks()) == 2)
    process.send_signal(number)
    assert process.wait(SOON) == code
    wait_until(lambda: not traces.processes(), SOON)
    assert traces.processes() == []
    if number == signal.SIGKILL:  # what it could not remove goes when the next folder is made
        remove_leftovers()
    assert traces.left() == []


@pytest.mark.slow
def test_time_that_is_up_makes_exit_code_1_and_a_finding(traces):
    command = [sys.executable, "-c", DOCTOR_WITHOUT_FACTS, "--limit", "1"]
    done = subprocess.run(command, cwd=PACK_ROOT, capture_output=True, text=True, timeout=600)
    assert done.returncode == 1, done.stderr
    assert "[broken] The collectives did not finish within 1 seconds: rank 0 was " in done.stdout
    assert traces.left() == []


def test_one_damaged_number_is_noticed(monkeypatch, tmp_path):
    dist.init_process_group("gloo", store=dist.FileStore(str(tmp_path / "store"), 1), rank=0, world_size=1)
    try:
        buffer = torch.empty(5000)
        verify(buffer)
        true_exchange = dist.all_to_all_single

        def damage(output: torch.Tensor, *others: torch.Tensor) -> None:
            true_exchange(output, *others)
            output[4321] += 1

        monkeypatch.setattr(dist, "all_to_all_single", damage)
        with pytest.raises(WrongResult, match="1 wrong numbers out of 5000"):
            verify(buffer)
    finally:
        dist.destroy_process_group()
