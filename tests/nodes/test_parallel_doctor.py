"""The node's side of the doctor: a process that is read, bounded, cancelled, and gone."""

from __future__ import annotations

import os
import sys
import time

import psutil
import pytest

from parallel_runtime.errors import ConfigurationError, PoolError
from parallel_runtime.requests.control import Cancelled
from tests.patience import SOON
from workers.doctor.__main__ import COMMAND, PACK_ROOT, Verdict, parse_arguments, run_doctor


def never() -> bool:
    return False


def doctor(script: str) -> list[str]:
    """A stand-in for the doctor."""
    return [sys.executable, "-c", "import json, os, sys, time\n" + script]


def says(works: bool, code: int) -> list[str]:
    return doctor(f"print(json.dumps({{'works': {works}, 'said': ' '.join(sys.argv[1:])}})); sys.exit({code})")


@pytest.mark.parametrize(("works", "code"), [(True, 0), (False, 1)])
def test_a_report_is_handed_on_whether_good_or_bad(works, code):
    assert run_doctor("0,1", never, says(works, code)) == Verdict(works, "--devices 0,1")


def test_a_report_larger_than_a_pipe_comes_whole():
    script = "print(json.dumps({'works': True, 'said': 'x' * 1_000_000})); sys.stderr.write('y' * 1_000_000)"
    assert len(run_doctor("auto", never, doctor(script)).text) == 1_000_000


def test_devices_that_are_not_there_are_a_configuration_error():
    with pytest.raises(ConfigurationError, match="asks for GPU 7"):
        run_doctor("7", never, doctor("sys.stderr.write('It asks for GPU 7.\\n'); sys.exit(2)"))


@pytest.mark.parametrize(
    ("script", "what"),
    [
        ("raise ImportError('no psutil')", "code 1 and no report. It said: ImportError: no psutil"),
        ("os.kill(os.getpid(), 9)", "code -9 and no report. It said: nothing"),
        ("print('[]')", "code 0 and no report"),
        ("print(json.dumps({'works': True}))", "code 0 and no report"),
    ],
)
def test_a_doctor_without_a_report_is_a_readable_error(script, what):
    with pytest.raises(PoolError, match=what) as raised:
        run_doctor("auto", never, doctor(script))
    assert f"python -m workers.doctor in {PACK_ROOT}" in raised.value.fix


def test_a_doctor_that_hangs_is_ended():
    start = time.monotonic()
    with pytest.raises(PoolError, match="no end within 1 seconds"):
        run_doctor("auto", never, doctor("time.sleep(600)"), limit_seconds=1)
    assert time.monotonic() - start < 2 * SOON
    assert not living_children()


@pytest.mark.slow
def test_cancel_ends_the_real_doctor_and_what_it_started():
    seen: list[psutil.Process] = []

    def cancel_once_it_works() -> bool:
        seen.extend(process for process in living_children() if process not in seen)
        return len(seen) >= 2  # the doctor, and the process that reads the machine's facts

    with pytest.raises(Cancelled):
        run_doctor("cpu:2", cancel_once_it_works)
    assert len(seen) >= 2
    assert not [process for process in seen if process.is_running() and process.status() != psutil.STATUS_ZOMBIE]


def test_the_command_is_one_that_the_doctor_takes():
    parsed = parse_arguments([*COMMAND[3:], "--devices", "cpu:2"])
    assert parsed.json
    assert parsed.end_with_parent
    assert parsed.devices == "cpu:2"


def living_children() -> list[psutil.Process]:
    """Processes below this one that the doctor could have started."""
    children = psutil.Process(os.getpid()).children(recursive=True)
    ours = []
    for child in children:
        try:
            if child.status() != psutil.STATUS_ZOMBIE and {"-c", "workers.doctor", "workers.doctor.machine"} & set(
                child.cmdline()
            ):
                ours.append(child)
        except psutil.NoSuchProcess:
            continue
    return ours
