"""A file that is read through is read whole, once, and its reader hears how far it is."""

from __future__ import annotations

import os
import time

import pytest

from parallel_runtime.errors import CheckpointError
from parallel_runtime.loading import reading
from parallel_runtime.loading.reading import read_through


@pytest.mark.parametrize("size", [0, 1, 1000, 100_003])
def test_every_byte_is_read_once(tmp_path, monkeypatch, size):
    monkeypatch.setattr(reading, "BUFFER", 1000)
    path = tmp_path / "file"
    path.write_bytes(os.urandom(size))
    ranges, plain = [], os.preadv

    def preadv(descriptor, buffers, start):
        count = plain(descriptor, buffers, start)
        ranges.append((start, start + count))
        return count

    monkeypatch.setattr(os, "preadv", preadv)
    told = []
    read_through(path, lambda done, total: told.append((done, total)))
    assert sorted(ranges) == [(start, min(start + 1000, size)) for start in range(0, size, 1000)]
    assert told[-1] == (size, size)


def test_who_gives_up_ends_the_threads(tmp_path, monkeypatch):
    monkeypatch.setattr(reading, "BUFFER", 10)
    path = tmp_path / "file"
    path.write_bytes(bytes(100_000))
    calls = []

    def preadv(*_):
        calls.append(time.sleep(0.01))
        return 10

    monkeypatch.setattr(os, "preadv", preadv)

    def give_up(done, total):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        read_through(path, give_up)
    assert len(calls) < 1000  # of 10,000


def test_a_disk_that_fails_is_named(tmp_path, monkeypatch):
    path = tmp_path / "file"
    path.write_bytes(bytes(10))

    def fail(*_):
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(os, "preadv", fail)
    with pytest.raises(CheckpointError, match="Input/output error"):
        read_through(path, lambda done, total: None)
