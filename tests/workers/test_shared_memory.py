"""The memory that client and rank 0 share: what is written in one process is what the other reads."""

from __future__ import annotations

import fcntl
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from parallel_runtime.errors import SegmentError
from workers.rank.inbox import share
from workers.wire.tensors import LEAST_BYTES, Segment, unpack, write

TENSORS = {
    "x": torch.randn(2, 3, 5),
    "flag": torch.tensor([True, False, True]),
    "none": torch.empty(0, 4),
    "half": torch.randn(7, 3).bfloat16().t(),  # not contiguous, and behind an odd number of bytes
    "number": torch.tensor(2.5, dtype=torch.float64),
}

OTHER_PROCESS = """
import sys, torch
from workers.wire.tensors import Segment
segment = Segment.open(sys.argv[1])
size = int(sys.argv[2])
segment.answer[:size] = segment.request[:size].flip(0)
"""


@pytest.fixture
def segment():
    made = Segment.create(0)
    yield made
    made.close()


@pytest.mark.slow
def test_another_process_reads_and_answers_what_is_written(segment):
    specs = write(segment.request, TENSORS)
    size = sum(tensor.nbytes for tensor in TENSORS.values())
    root = Path(__file__).parents[2]
    subprocess.run([sys.executable, "-c", OTHER_PROCESS, segment.path, str(size)], cwd=root, check=True, timeout=600)
    back = unpack(specs, segment.answer[:size].flip(0))
    assert back.keys() == TENSORS.keys()
    for name, tensor in TENSORS.items():
        assert back[name].dtype == tensor.dtype
        assert torch.equal(back[name], tensor), name


def test_halves_do_not_overlap_and_grow_in_few_sizes(segment):
    segment.request.fill_(1)
    segment.answer.fill_(2)
    assert int(segment.request.min()) == int(segment.request.max()) == 1
    assert segment.request.numel() == segment.answer.numel() == LEAST_BYTES // 2
    for size in (1, LEAST_BYTES // 2, LEAST_BYTES // 2 + 1, 10**8):
        made = Segment.create(size)
        assert size <= made.request.numel() <= max(LEAST_BYTES // 2, 2 * size)
        made.close()


def test_nobody_can_make_a_segment_smaller_under_a_reader(segment):
    with pytest.raises(PermissionError):
        os.truncate(segment.path, 4096)


def test_what_is_no_segment_is_refused(tmp_path, segment):
    plain = tmp_path / "file"
    plain.write_bytes(b"0" * 4096)
    with plain.open("r+b") as file:
        for path in (
            str(plain),
            "",
            f"/proc/{os.getpid()}/fd/../../etc/passwd",
            f"/proc/{os.getpid()}/fd/{file.fileno()}",
        ):
            with pytest.raises(SegmentError):
                Segment.open(path)
    unsealed = os.memfd_create("unsealed", os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(unsealed, 4096)
        with pytest.raises(SegmentError, match="no segment"):
            Segment.open(f"/proc/{os.getpid()}/fd/{unsealed}")
        assert not fcntl.fcntl(unsealed, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK
    finally:
        os.close(unsealed)


def test_a_closed_segment_leaves_no_descriptor_and_no_mapping():
    def state() -> tuple[int, int]:
        maps = Path("/proc/self/maps").read_text()
        return len(os.listdir("/proc/self/fd")), maps.count("memfd:parallel-dit")

    before = state()
    for _ in range(3):
        Segment.create(0).close()
    assert state() == before


def test_a_rank_copies_what_the_memory_begins_with(segment):
    specs = write(segment.request, TENSORS)
    copied = share(specs, segment.request, torch.device("cpu"), 1)
    segment.request.zero_()
    assert copied.keys() == TENSORS.keys()
    assert all(torch.equal(copied[name], tensor) for name, tensor in TENSORS.items())


def test_memory_that_was_made_in_inference_mode_is_written_to_outside_of_it():
    """As a node that trains, and leaves ComfyUI's mode, does after one that sampled."""
    with torch.inference_mode():
        made = Segment.create(0)
    try:
        write(made.request, TENSORS)
    finally:
        made.close()


def test_a_type_that_does_not_travel_is_refused_before_anything_is_written(segment):
    with pytest.raises(TypeError, match="complex64"):
        write(segment.request, {"z": torch.zeros(1, dtype=torch.complex64)})


def test_a_later_segment_is_told_from_an_earlier_one_whose_path_it_has():
    first = Segment.create(0)
    path = first.path
    opened = Segment.open(path)
    assert opened.is_at(path)
    first.close()
    later = Segment.create(LEAST_BYTES)
    assert later.path == path  # the lowest free number is taken
    assert not opened.is_at(path)
    assert Segment.open(path).request.numel() == LEAST_BYTES
    later.close()
    assert not opened.is_at(path)
