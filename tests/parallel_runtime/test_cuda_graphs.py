"""CUDA graphs themselves: what they replay, the pools that they take, and what a failed one leaves."""

from __future__ import annotations

import contextlib
import gc
from typing import Any

import pytest
import torch

from parallel_runtime.acceleration.cuda_graphs import captured, is_long, timed
from parallel_runtime.acceleration.recordings import WARM_RUNS, RecordedForward
from parallel_runtime.mesh.mesh import single_rank_mesh
from parallel_runtime.networks.marked_blocks import Pulse

ONE = single_rank_mesh()
CAPTURING = "operation not permitted when stream is capturing"


@pytest.mark.parametrize(
    ("launching", "computing", "long"),
    [(0.02, 0.69, True), (0.02, 0.12, False), (0.05, 0.25, True), (0.2, 0.21, False), (0.5, 2.9, True)],
)
def test_long_is_what_takes_the_gpu_longer_than_the_host(launching, computing, long):
    assert is_long(launching, computing) is long


@pytest.mark.gpu
def test_a_gpu_tells_whether_a_forward_was_long():
    device = torch.device("cuda", 0)

    def waits() -> None:
        torch.cuda._sleep(2 * 10**9)  # cycles: about a second

    def is_waited_for() -> None:
        waits()
        torch.cuda.synchronize()

    waits()  # CUDA begins
    for run, wanted in ((waits, True), (is_waited_for, False), (lambda: None, False)):
        torch.cuda.synchronize()
        _, was_long = timed(run, device)
        assert was_long() is wanted


@pytest.mark.gpu
def test_a_cuda_graph_gives_what_the_forward_gives():
    recorded = RecordedForward(lambda x: (x @ x.t()).relu())
    for _ in range(WARM_RUNS + 3):
        x = torch.randn(64, 32, device="cuda")
        assert torch.equal(recorded(ONE, (x,), {}), (x @ x.t()).relu())


@pytest.mark.gpu
def test_what_a_library_does_once_a_stream_is_over_before_a_recording_begins():
    seen: set[int] = set()

    def forward(x: torch.Tensor) -> torch.Tensor:
        stream = torch.cuda.current_stream()
        if stream.cuda_stream not in seen:
            seen.add(stream.cuda_stream)
            torch.cuda.synchronize()  # as taking memory does, not allowed while the stream records
        return 2 * x

    recorded = RecordedForward(forward)
    for _ in range(WARM_RUNS + 3):
        x = torch.randn(64, device="cuda")
        assert torch.equal(recorded(ONE, (x,), {}), 2 * x)
    (kind,) = recorded._over[ONE.sequence_ranks].kinds.values()
    assert kind.replay is not None


@pytest.mark.gpu
def test_gpu_a_graph_replays_the_forward_and_counts_its_blocks():
    pulse = Pulse(torch.device("cuda"))
    weights = [torch.randn(256, 256, device="cuda") / 16 for _ in range(8)]

    def forward(x: torch.Tensor) -> torch.Tensor:
        for weight in weights:
            x = torch.tanh(x @ weight) + x
            pulse.mark()
        return x

    recorded = RecordedForward(forward)
    mesh = single_rank_mesh()
    for _ in range(8):
        x = torch.randn(32, 256, device="cuda")
        assert torch.allclose(recorded(mesh, (x,), {}), forward(x), atol=1e-4)
    (kind,) = recorded._over[mesh.sequence_ranks].kinds.values()
    assert kind.replay is not None
    before = pulse.count
    recorded(mesh, (x,), {})
    torch.cuda.synchronize()
    assert pulse.count == before + len(weights)


class FakeCuda:
    """What recording needs of torch.cuda, with the allocator's rule: a pool whose last graph is gone is gone, too."""

    def __init__(self) -> None:
        graphs_in: dict[int, int] = {}

        class Graph:
            def capture_begin(self, pool: int, capture_error_mode: str) -> None:
                if graphs_in.get(pool) == 0:
                    raise RuntimeError("use_count > 0 INTERNAL ASSERT FAILED")
                self.pool = pool
                graphs_in[pool] = graphs_in.get(pool, 0) + 1

            def capture_end(self) -> None:
                """Nothing was captured."""

            def replay(self) -> None:
                """Nothing is launched."""

            def __del__(self) -> None:
                graphs_in[self.pool] -= 1

        self.CUDAGraph = Graph
        self.handles = iter(range(100))
        self.graphs_in = graphs_in

    def install(self, monkeypatch: pytest.MonkeyPatch) -> None:
        class Stream:
            def wait_stream(self, other: Any) -> None:
                """Nothing runs."""

        for name, value in {
            "CUDAGraph": self.CUDAGraph,
            "graph_pool_handle": lambda: next(self.handles),
            "Stream": Stream,
            "current_stream": Stream,
            "stream": lambda stream: contextlib.nullcontext(),
            "synchronize": lambda: None,
            "empty_cache": lambda: None,
        }.items():
            monkeypatch.setattr(torch.cuda, name, value)


def test_a_recording_after_all_others_are_gone_takes_a_pool_that_is_alive(monkeypatch):
    cuda = FakeCuda()
    cuda.install(monkeypatch)
    recorded = RecordedForward(lambda x: 2 * x)

    def record(size: int) -> None:
        for _ in range(WARM_RUNS + 1):
            recorded(ONE, (torch.ones(size),), {})
        kinds = recorded._over[ONE.sequence_ranks].kinds.values()
        assert [kind.replay is not None for kind in kinds][-1]

    record(1)
    record(2)
    assert list(cuda.graphs_in.values()) == [2]  # both in one pool
    recorded.go_on(ONE.sequence_ranks, 7)  # other ranks had lost theirs
    assert list(cuda.graphs_in.values()) == [0]
    record(1)
    recorded.lose()
    record(3)
    assert [count for count in cuda.graphs_in.values() if count] == [1]


def test_no_garbage_of_others_is_collected_while_a_forward_is_recorded(monkeypatch):
    cuda = FakeCuda()
    cuda.install(monkeypatch)
    recording: list[bool] = []
    collected: list[bool] = []
    begin, end = cuda.CUDAGraph.capture_begin, cuda.CUDAGraph.capture_end
    monkeypatch.setattr(
        cuda.CUDAGraph, "capture_begin", lambda *args, **how: (begin(*args, **how), recording.append(True))
    )
    monkeypatch.setattr(cuda.CUDAGraph, "capture_end", lambda *args: (recording.clear(), end(*args)))

    class Engine:
        def __init__(self) -> None:
            self.itself = self  # only the collector finds it

        def __del__(self) -> None:
            collected.append(bool(recording))

    def forward(x: torch.Tensor) -> torch.Tensor:
        Engine()
        assert [[] for _ in range(20_000)]  # the collector runs, if it may
        return 2 * x

    recorded = RecordedForward(forward)
    assert gc.isenabled()
    for _ in range(WARM_RUNS + 1):
        recorded(ONE, (torch.ones(3),), {})
    assert len(collected) >= WARM_RUNS
    assert not any(collected)
    assert gc.isenabled()


@pytest.mark.parametrize("knows", [False, True])
def test_the_allocator_is_told_of_a_recording_that_failed_unless_it_knows(knows, monkeypatch):
    FakeCuda().install(monkeypatch)
    told: list[tuple[str, int, Any]] = []

    def fail(graph: Any) -> None:
        raise RuntimeError(CAPTURING)

    def leave(device: int, pool: Any) -> None:
        if knows:
            raise RuntimeError("endAllocatePool: not currently recording to mempool_id")
        told.append(("leave", device, pool))

    monkeypatch.setattr(torch.cuda.CUDAGraph, "capture_end", fail)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    monkeypatch.setattr(torch._C, "_cuda_endAllocateToPool", leave, raising=False)
    release = lambda device, pool: told.append(("release", device, pool))  # noqa: E731
    monkeypatch.setattr(torch._C, "_cuda_releasePool", release, raising=False)
    with pytest.raises(RuntimeError, match=CAPTURING), captured(7):
        pass
    assert told == ([] if knows else [("leave", 3, 7), ("release", 3, 7)])


@pytest.mark.gpu
def test_gpu_memory_can_be_let_go_after_a_recording_that_failed():
    recorded = RecordedForward(lambda x: x + torch.arange(4).to(x))
    x = torch.ones(4, device="cuda")
    for _ in range(WARM_RUNS + 2):
        recorded(ONE, (x,), {})
    (own,) = recorded._over.values()
    assert not own.enabled
    torch.cuda.empty_cache()  # what other tests left
    before = torch.cuda.memory_reserved()
    held = torch.empty(1 << 30, device="cuda", dtype=torch.uint8)
    del held
    torch.cuda.empty_cache()  # dies of an assertion where the allocator believes that something is recorded
    assert torch.cuda.memory_reserved() <= before
    again = RecordedForward(lambda x: 2 * x)
    for _ in range(WARM_RUNS + 2):
        assert torch.equal(again(ONE, (x,), {}), 2 * x)
    (kind,) = again._over[ONE.sequence_ranks].kinds.values()
    assert kind.replay is not None
