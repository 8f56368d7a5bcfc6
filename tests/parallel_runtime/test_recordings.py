"""When forwards are recorded, replayed and not: with a stand-in for the CUDA graph, so on any machine."""

from __future__ import annotations

import contextlib
import weakref
from dataclasses import replace
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from parallel_runtime.acceleration import recorded_kinds
from parallel_runtime.acceleration import recordings as graphs
from parallel_runtime.acceleration.recordings import KEPT, WARM_RUNS, RecordedForward
from parallel_runtime.config import ParallelPlan
from parallel_runtime.mesh.agreement import NONE, agreed_history, offer_history
from parallel_runtime.mesh.mesh import Mesh, build_mesh, single_rank_mesh
from parallel_runtime.requests.control import Cancelled
from tests.ranks import run_ranks
from tests.recorders import recorded_by

ONE = single_rank_mesh()
CAPTURING = "operation not permitted when stream is capturing"


class Recorder:
    """Records as a CUDA graph would: the replay reads only the tensors that were there when it was recorded."""

    def __init__(self, fails: Exception | None = None):
        self.fails = fails
        self.recorded = 0

    def __call__(self, call: Any, static: list[torch.Tensor], made_outside: Any) -> Any:
        if self.fails is not None:
            raise self.fails
        self.recorded += 1

        def replay(tensors: list[torch.Tensor]) -> Any:
            for old, new in zip(static, tensors, strict=True):
                old.copy_(new)
            return call(static)

        return replay


def counted() -> tuple[Any, list[int]]:
    """A forward and the number of its runs, kept in a list."""
    runs = [0]

    def forward(x: torch.Tensor, *, factor: float = 2.0, more: dict[str, torch.Tensor] | None = None) -> Any:
        runs[0] += 1
        return (x * factor + (more["bias"] if more else 0.0),)

    return forward, runs


def test_a_repeated_call_is_recorded_after_its_warm_runs_and_gives_what_the_forward_gives():
    forward, _ = counted()
    recorder = Recorder()
    recorded = recorded_by(recorder, RecordedForward(forward))
    for step in range(WARM_RUNS + 3):
        x, bias = torch.randn(3), torch.randn(3)
        output = recorded(ONE, (x,), {"factor": 3.0, "more": {"bias": bias}})
        assert torch.equal(output[0], x * 3.0 + bias)
        assert recorder.recorded == int(step >= WARM_RUNS)


def test_a_forward_is_recorded_anew_after_one_run_when_the_memory_that_its_group_shares_grew(caplog):
    """A forward sends a table once for each memory, as attention does where that lies: no two calls differ after."""
    recorder, peers = Recorder(), SimpleNamespace(made=1)
    tables: dict[int, torch.Tensor] = {}

    def forward(x: torch.Tensor) -> torch.Tensor:
        if peers.made not in tables:
            tables[peers.made] = torch.tensor([1.0, 2.0, 3.0], device=x.device)
        return x * tables[peers.made]

    recorded = recorded_by(recorder, RecordedForward(forward, probe=lambda tensors: [2 * tensors[0]]))
    mesh = replace(ONE, peers=peers)
    for step in range(WARM_RUNS + 5):
        if step == WARM_RUNS + 2:
            peers.made += 1  # by a larger picture, on all ranks of the group
        assert torch.equal(recorded(mesh, (torch.ones(3),), {}), torch.tensor([1.0, 2.0, 3.0]))
        assert recorder.recorded == (step >= WARM_RUNS) + (step >= WARM_RUNS + 3)
    assert not caplog.messages


@pytest.mark.parametrize("long", [False, True])
def test_a_forward_that_is_long_is_run_and_never_recorded(monkeypatch, long):
    told = []

    def timed(run: Any, device: torch.device) -> tuple[Any, Any]:
        told.append(device.type)
        return run(), lambda: long

    monkeypatch.setattr(graphs, "timed", timed)
    forward, runs = counted()
    recorder = Recorder()
    recorded = recorded_by(recorder, RecordedForward(forward))
    for _ in range(WARM_RUNS + 4):
        x = torch.randn(3)
        assert torch.equal(recorded(ONE, (x,), {})[0], 2 * x)
    assert told == ["cpu"]
    assert recorder.recorded == int(not long)
    assert not long or runs == [WARM_RUNS + 4]


def test_a_run_that_a_cancel_ended_does_not_count_so_a_long_one_is_not_recorded_behind_it(monkeypatch):
    monkeypatch.setattr(graphs, "timed", lambda run, device: (run(), lambda: True))
    cancels = iter([False] * (WARM_RUNS - 1) + [True] + [False] * 4)

    def forward(x: torch.Tensor) -> torch.Tensor:
        if next(cancels):
            raise Cancelled
        return 2 * x

    recorder = Recorder()
    recorded = recorded_by(recorder, RecordedForward(forward))
    for call in range(WARM_RUNS + 4):
        with pytest.raises(Cancelled) if call == WARM_RUNS - 1 else contextlib.nullcontext():
            recorded(ONE, (torch.ones(2),), {})
    assert recorder.recorded == 0


@pytest.mark.parametrize("change", ["shape", "dtype", "number", "mesh", "structure"])
def test_another_kind_of_call_gets_a_recording_of_its_own(change):
    forward, _ = counted()
    recorder = Recorder()
    recorded = recorded_by(recorder, RecordedForward(forward))
    other = {
        "shape": (ONE, torch.randn(4), {}),
        "dtype": (ONE, torch.randn(3, dtype=torch.float64), {}),
        "number": (ONE, torch.randn(3), {"factor": 5.0}),
        "mesh": (single_rank_mesh(), torch.randn(3), {}),
        "structure": (ONE, torch.randn(3), {"more": {"bias": torch.randn(3)}}),
    }[change]
    for _ in range(WARM_RUNS + 1):
        recorded(ONE, (torch.randn(3),), {})
    mesh, x, kwargs = other
    for _ in range(WARM_RUNS + 2):
        assert torch.equal(recorded(mesh, (x,), kwargs)[0], forward(x, **kwargs)[0])
    assert recorder.recorded == 2


def test_arguments_that_cannot_be_compared_run_plainly():
    recorder = Recorder()
    recorded = recorded_by(recorder, RecordedForward(lambda x, note: x + 1))
    for _ in range(WARM_RUNS + 2):
        recorded(ONE, (torch.zeros(1), object()), {})
    assert recorder.recorded == 0


def test_the_oldest_kind_is_forgotten():
    forward, _ = counted()
    recorder = Recorder()
    recorded = recorded_by(recorder, RecordedForward(forward))
    for size in [*range(1, KEPT + 2), 1]:
        for _ in range(WARM_RUNS + 1):
            recorded(ONE, (torch.randn(size),), {})
    assert recorder.recorded == KEPT + 2


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (RuntimeError(f"{CAPTURING}\nmore"), CAPTURING),
        (AttributeError("no attribute 'graph_pool_handle'"), "no attribute 'graph_pool_handle'"),  # another torch
        (AssertionError(), "AssertionError"),
    ],
)
def test_a_failed_recording_ends_the_recording_with_one_line_and_the_call_has_its_result(error, said, caplog):
    forward, runs = counted()
    recorded = recorded_by(Recorder(error), RecordedForward(forward))
    for _ in range(WARM_RUNS + 4):
        assert torch.equal(recorded(ONE, (torch.ones(2),), {})[0], torch.full((2,), 2.0))
    assert [record.getMessage() for record in caplog.records] == [
        f"Forwards are launched kernel by kernel, as recording one failed: {said}"
    ]
    assert runs[0] == WARM_RUNS + 4
    assert recorded.failed(ONE)
    recorded.go_on(ONE.sequence_ranks, 7)
    assert not recorded.failed(ONE), "a request that ranks agreed on begins anew"


class Baking(Recorder):
    """Records as a CUDA graph does where the host has read a value: it stays what it was."""

    def __call__(self, call: Any, static: list[torch.Tensor], made_outside: Any) -> Any:
        read = [tensor.clone() for tensor in static]
        return lambda tensors: call([tensors[0], *read[1:]])


@pytest.mark.parametrize(("recorder", "believed"), [(Recorder(), True), (Baking(), False)])
def test_a_recording_is_believed_only_if_it_follows_other_values(recorder, believed, caplog):
    def forward(x: torch.Tensor, timestep: torch.Tensor) -> torch.Tensor:
        return x * timestep

    recorded = recorded_by(recorder, RecordedForward(forward, probe=lambda given: [0.9 * each for each in given]))
    for step in range(WARM_RUNS + 3):
        x, timestep = torch.randn(3), torch.tensor(1.0 + step)
        assert torch.equal(recorded(ONE, (x, timestep), {}), x * timestep)
    replays = [kind.replay for kind in recorded._over[ONE.sequence_ranks].kinds.values()]
    assert any(replay is not None for replay in replays) == believed
    assert caplog.messages == (
        []
        if believed
        else [
            "Forwards are launched kernel by kernel, as recording one failed: "
            "its graph gives something else for other values"
        ]
    )


def test_a_rank_alone_records_again_what_it_lost_and_one_of_several_only_when_they_begin_anew(monkeypatch):
    for module in (graphs, recorded_kinds):
        monkeypatch.setattr(module, "all_agree", lambda agreed, *_: agreed)
    forward, _ = counted()
    several = Mesh(ParallelPlan(ulysses=2), 0, ONE.coordinate, sequence=SimpleNamespace(group_name="0"))
    for mesh, again in ((ONE, 1), (several, 0)):
        recorder = Recorder()
        recorded = recorded_by(recorder, RecordedForward(forward))
        for _ in range(WARM_RUNS + 2):
            recorded(mesh, (torch.randn(3),), {})
        assert recorder.recorded == 1
        recorded.lose()
        assert recorded.history(mesh.sequence_ranks) == NONE
        for _ in range(WARM_RUNS + 1):
            recorded(mesh, (torch.randn(3),), {})
        assert recorder.recorded == 1 + again
        recorded.go_on(mesh.sequence_ranks, 7)
        for _ in range(WARM_RUNS + 1):
            recorded(mesh, (torch.randn(3),), {})
        assert recorder.recorded == 2 + again


def test_histories_that_differ_begin_anew_under_a_number_that_nobody_had():
    ranks = (0, 1)
    for numbers, expected in (((3, 3), 3), ((3, 5), 6), ((NONE, 4), 5), ((NONE, NONE), 1)):
        offers = [offer_history(ranks, number) for number in numbers]
        assert agreed_history(ranks, {name: min(offer[name] for offer in offers) for name in offers[0]}) == expected
    assert offer_history((2,), 3) == {}
    assert agreed_history(ranks, {}) is None


def record_on_ranks(rank: int, world_size: int) -> dict[str, Any]:
    """Run by `run_ranks`: forwards with a collective, where one rank fails to record, and where some take long."""
    mesh = build_mesh(ParallelPlan(ulysses=world_size), rank, world_size)
    assert mesh is not None
    assert mesh.sequence is not None

    def forward(x: torch.Tensor) -> torch.Tensor:
        total = x.clone()
        dist.all_reduce(total, group=mesh.sequence)
        return total

    def run(recorded: RecordedForward) -> list[float]:
        return [recorded(mesh, (torch.full((1,), float(step)),), {}).item() for step in range(WARM_RUNS + 4)]

    failing = recorded_by(Recorder(RuntimeError(CAPTURING) if rank == 1 else None), RecordedForward(forward))
    outputs = run(failing)
    outputs, recorded = [outputs], []
    for long in ((1,), (0, 1)):
        recorder = Recorder()
        with mock.patch.object(graphs, "timed", lambda run, device, long=long: (run(), lambda: rank in long)):
            outputs.append(run(recorded_by(recorder, RecordedForward(forward))))
        recorded.append(recorder.recorded)
    return {"outputs": outputs, "enabled": failing._over[mesh.sequence_ranks].enabled, "recorded": recorded}


def test_where_one_rank_fails_to_record_or_all_take_long_no_rank_replays():
    """One alone that takes long may wait for another's launches, which a recording saves."""
    for result in run_ranks(2, f"{__name__}:record_on_ranks"):
        assert result["outputs"] == [[2.0 * step for step in range(WARM_RUNS + 4)]] * 3
        assert result["enabled"] is False
        assert result["recorded"] == [1, 0]


def test_kinds_of_which_one_is_compiled_take_turns_and_each_keeps_its_recording():
    forward, _ = counted()
    recorder = Recorder()
    recorded = recorded_by(recorder, RecordedForward(forward))
    short, long = torch.randn(3), torch.randn(5)
    for _ in range(WARM_RUNS + 3):  # as steps with two texts, the graphs of one of which could not be made
        for x, compiled in ((short, True), (long, False)):
            assert torch.equal(recorded(ONE, (x,), {}, compiled)[0], 2 * x)
    assert recorder.recorded == 2


def test_a_kind_that_runs_compiled_from_now_on_lets_its_old_recording_go_and_no_other():
    forward, _ = counted()
    recorder = Recorder()
    recorded = recorded_by(recorder, RecordedForward(forward))
    short, long = torch.randn(3), torch.randn(5)
    for _ in range(WARM_RUNS + 2):
        recorded(ONE, (short,), {})
        recorded(ONE, (long,), {})
    kept = [weakref.ref(kind) for kind in recorded._over[ONE.sequence_ranks].kinds.values()]
    recorded(ONE, (short,), {}, True)
    assert [kind() is None for kind in kept] == [True, False]
    for _ in range(WARM_RUNS + 2):
        assert torch.equal(recorded(ONE, (short,), {}, True)[0], 2 * short)
        recorded(ONE, (long,), {})
    assert recorder.recorded == 3
