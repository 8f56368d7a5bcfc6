"""Files are on their way to memory while ranks start."""

from __future__ import annotations

import os
from types import SimpleNamespace

import pytest

from parallel_runtime.config import ParallelConfig
from parallel_runtime.errors import PoolError
from workers.client import keeper, loading
from workers.client.client import ModelRequest, PoolClient
from workers.launch import PoolSpec


@pytest.fixture
def asked(monkeypatch) -> set[int]:
    """Bytes of the file that the system was asked for, in units of 128 KiB."""
    seen: set[int] = set()

    def note(descriptor: int, start: int, length: int, advice: int) -> None:
        assert advice == os.POSIX_FADV_WILLNEED
        assert start % length == 0
        seen.add(start // length)

    monkeypatch.setattr(os, "posix_fadvise", note)
    return seen


def test_the_whole_file_is_asked_for_in_pieces_that_no_kernel_cuts_short(asked, tmp_path):
    file = tmp_path / "model.safetensors"
    file.write_bytes(bytes(1_000_000))
    loading.begin_reading(str(file)).join()
    assert asked == set(range(8))


def test_no_more_is_asked_for_than_half_of_the_memory_that_is_available(asked, monkeypatch, tmp_path):
    file = tmp_path / "model.safetensors"
    file.write_bytes(bytes(1_000_000))
    monkeypatch.setattr(loading.psutil, "virtual_memory", lambda: SimpleNamespace(available=512 << 10))
    loading.begin_reading(str(file)).join()
    assert asked == {0, 1}


def test_what_is_wrong_with_a_file_is_left_to_the_ranks(asked, tmp_path):
    loading.begin_reading(str(tmp_path / "none.safetensors")).join()
    assert not asked


def test_a_load_that_starts_a_pool_reads_ahead_before_it_waits(monkeypatch):
    order: list[str] = []

    def start(*_: object) -> None:
        order.append("start")
        raise PoolError("Enough seen.", "")

    monkeypatch.setattr(loading, "begin_reading", order.append)
    monkeypatch.setattr(keeper, "RunningPool", start)
    with pytest.raises(PoolError, match="Enough seen"):
        PoolClient(PoolSpec("cpu", (0,))).load(ModelRequest("a path", "float32", ParallelConfig(devices="cpu:1")))
    assert order == ["a path", "start"]


def test_a_pool_that_begins_before_its_load_is_not_waited_for_and_not_begun_again(monkeypatch):
    order: list[str] = []

    def start(*_: object) -> SimpleNamespace:
        order.append("start")
        return SimpleNamespace(alive=True, settle=lambda _: None)

    monkeypatch.setattr(loading, "begin_reading", order.append)
    monkeypatch.setattr(keeper, "RunningPool", start)
    client = PoolClient(PoolSpec("cpu", (0,)))
    client.begin("a path")
    client.begin("a path")
    assert order == ["a path", "start"]
