"""A process tree is ended as a whole: asked where there is time to, killed where that does not help."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from tests.patience import SOON, wait_until
from workers.leftovers import end_tree

TREE = """
import signal, subprocess, sys, time
from pathlib import Path
folder, depth, deaf = Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
def leave(number, frame):
    (folder / f"asked {depth}").touch()
    if deaf == "no":
        sys.exit(0)
signal.signal(signal.SIGTERM, leave)
if depth:
    subprocess.Popen([sys.executable, "-c", sys.argv[4], str(folder), str(depth - 1), deaf, sys.argv[4]])
(folder / f"there {depth}").touch()
while True:
    time.sleep(0.05)
"""


@pytest.fixture
def tree(tmp_path):
    """Starts a process with two generations below it; returns it and their psutil processes."""
    started: list[psutil.Process] = []

    def start(deaf: str) -> tuple[subprocess.Popen[bytes], list[psutil.Process]]:
        root = subprocess.Popen([sys.executable, "-c", TREE, str(tmp_path), "2", deaf, TREE])
        assert wait_until(lambda: len(list(tmp_path.glob("there *"))) == 3)
        started.extend([psutil.Process(root.pid), *psutil.Process(root.pid).children(recursive=True)])
        assert len(started) == 3
        return root, started

    yield start
    for process in started:
        if process.is_running():
            process.kill()


def asked(folder: Path) -> int:
    return len(list(folder.glob("asked *")))


def ended(processes: list[psutil.Process]) -> bool:
    return not any(each.is_running() and each.status() != psutil.STATUS_ZOMBIE for each in processes)


def test_all_generations_are_asked_and_given_time(tree, tmp_path):
    root, processes = tree("no")
    end_tree(root.pid, 60)
    assert root.wait(60) == 0
    assert ended(processes)
    assert asked(tmp_path) == 3


def test_what_does_not_heed_or_is_stopped_is_killed_when_its_time_is_up(tree, tmp_path):
    root, processes = tree("yes")
    processes[1].send_signal(signal.SIGSTOP)
    began = time.monotonic()
    end_tree(root.pid, 2)
    assert 2 <= time.monotonic() - began < SOON
    assert root.wait(60) == -signal.SIGKILL
    assert ended(processes)
    assert asked(tmp_path) == 3  # the stopped one was woken to hear it


def test_without_grace_nobody_is_asked(tree, tmp_path):
    root, processes = tree("no")
    end_tree(root.pid)
    assert root.wait(60) == -signal.SIGKILL
    assert ended(processes)
    assert asked(tmp_path) == 0


def test_a_process_that_has_ended_is_no_error():
    root = subprocess.Popen([sys.executable, "-c", ""])
    while psutil.Process(root.pid).status() != psutil.STATUS_ZOMBIE:
        time.sleep(0.01)
    end_tree(root.pid, 60)
    assert root.wait(60) == 0
