"""Memory that ranks share asks for large pages, and is filled with what the file has."""

from __future__ import annotations

import mmap
import os
import re
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
import torch

from benchmarks import share_fill
from parallel_runtime.loading.host_copies import HostCopies
from parallel_runtime.loading.reading import BUFFER
from parallel_runtime.streaming.large_pages import in_large_pages
from parallel_runtime.streaming.share_memory import HostShare


@pytest.fixture(autouse=True)
def plenty(monkeypatch):
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=1 << 40, total=1 << 40))


def flags(name: str) -> list[str]:
    """Of each mapping of such memory, as the system has them."""
    entries = re.split(r"\n(?=[0-9a-f]+-[0-9a-f]+ )", Path("/proc/self/smaps").read_text())
    return [found[1] for each in entries if name in each and (found := re.search(r"VmFlags: (.*)", each))]


@pytest.mark.skipif(not Path("/sys/kernel/mm/transparent_hugepage").exists(), reason="a kernel without large pages")
def test_shares_and_copies_of_weights_ask_for_large_pages(tmp_path):
    share = HostShare(4 << 20)
    assert all(" hg" in f" {each}" for each in flags("memfd:parallel-dit-share"))
    assert flags("memfd:parallel-dit-share")
    share.close()
    with HostCopies(tmp_path).make("key", 4 << 20) as copy:
        assert copy is not None
        assert all(" hg" in f" {each}" for each in flags("memfd:parallel-dit-weights"))
        assert flags("memfd:parallel-dit-weights")


def test_a_kernel_without_them_gives_others():
    class Refusing(mmap.mmap):
        def madvise(self, *given):
            raise OSError(22, "Invalid argument")

    with pytest.raises(OSError, match="Invalid"):
        Refusing(-1, mmap.PAGESIZE).madvise(mmap.MADV_HUGEPAGE)
    in_large_pages(Refusing(-1, mmap.PAGESIZE))


def test_the_benchmark_fills_shares_with_the_files_bytes(tmp_path):
    file = tmp_path / "weights"
    file.write_bytes(os.urandom(1 << 20) * 17 + b"rest")
    size = file.stat().st_size
    assert size > BUFFER
    found = share_fill.measure(file, size, repeats=1)
    assert list(found) == ["read once", "into a share that is there", "into a fresh share"]
    assert all(clock > 0 for clock, _ in found.values())
    share = HostShare(size)
    share_fill._fill(file, share.memory)
    assert torch.equal(share.memory, torch.frombuffer(bytearray(file.read_bytes()), dtype=torch.uint8))
    share.close()
