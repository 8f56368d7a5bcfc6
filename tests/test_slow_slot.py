"""A slot that is some times as slow (benchmarks/slow_slot.py)."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from benchmarks import slow_slot
from parallel_runtime.exchange.host_lanes import StreamLane
from parallel_runtime.gpu_memory import cuda_driver
from parallel_runtime.requests.facts import HOST_MEMORY, known_gpu


@pytest.mark.parametrize("times", [1, 3])
def test_messages_are_copied_so_often_and_the_rate_is_told_so(times, monkeypatch):
    copied: list[tuple[int, ...]] = []
    monkeypatch.setattr(cuda_driver, "call", lambda name, *given: copied.append(given[:3]))
    for name in ("put", "get"):
        monkeypatch.setattr(StreamLane, name, getattr(StreamLane, name))
    slow_slot.begin(times)
    lane, part = StreamLane(SimpleNamespace(cuda_stream=1), 100), torch.zeros(5, dtype=torch.uint8)
    lane.put(7, part)
    lane.get(9, part)
    assert copied == [(107, part.data_ptr(), 5)] * times + [(part.data_ptr(), 109, 5)] * times
    machine = known_gpu("H200", 0, replace(HOST_MEMORY, route=30.0))
    assert slow_slot.told(machine, times).link.route == 30.0 / times
