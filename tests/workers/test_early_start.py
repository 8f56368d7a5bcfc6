"""Processes that began early are those of the pool that starts first, or end."""

from __future__ import annotations

import psutil
import pytest

from parallel_runtime.requests.comfyui_code import ComfyuiCode
from tests.patience import wait_until
from workers.client import supervisor_process
from workers.client.client import PoolClient
from workers.launch import EXPECTED_COMFYUI, PoolSpec

SPEC = PoolSpec("cpu", (0,))


@pytest.fixture
def early(monkeypatch, tmp_path):
    """The supervisor of a pool that began early."""
    monkeypatch.setenv("PARALLEL_DIT_LOGS", str(tmp_path))
    monkeypatch.setenv(EXPECTED_COMFYUI, "")  # so that it is as before when the test ends
    supervisor_process.start_early(SPEC, ComfyuiCode("/no/comfyui"))
    yield psutil.Process(supervisor_process._early[SPEC].pid)
    supervisor_process.take_early(None)


@pytest.mark.slow
def test_the_first_pool_takes_what_began_early(early):
    client = PoolClient(SPEC)
    try:
        assert client.start().pid == early.pid
        status = client.status()
        assert status is not None
        assert status.state == "idle"
        early.kill()
        assert wait_until(lambda: client.status() is None)  # the client knows
        assert client.start().pid != early.pid  # and the next one is its own
    finally:
        client.close()


@pytest.mark.slow
def test_what_began_early_for_other_devices_ends_when_a_pool_starts(early):
    client = PoolClient(PoolSpec("cpu", (0, 1)))
    try:
        assert client.start().pid != early.pid
        assert not early.is_running() or early.status() == psutil.STATUS_ZOMBIE
    finally:
        client.close()


def test_what_nobody_wants_ends(early):
    assert supervisor_process.take_early(None) is None
    assert not early.is_running() or early.status() == psutil.STATUS_ZOMBIE
