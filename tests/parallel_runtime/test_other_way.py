"""Forwards that have another way go it once all ranks are seen to go alike, and not while one does otherwise."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from parallel_runtime.acceleration import recordings as graphs
from parallel_runtime.acceleration.recordings import WARM_RUNS, RecordedForward
from parallel_runtime.config import ParallelPlan
from parallel_runtime.mesh.agreement import NONE
from parallel_runtime.mesh.mesh import build_mesh
from parallel_runtime.replaced import replaced
from tests.ranks import run_ranks
from tests.recorders import recorded_by

from .test_recordings import ONE, Recorder


class Way:
    """Another way of a forward, which is seen to do what `did` says."""

    def __init__(self, did: int):
        self.did, self.is_taken, self.refused = did, False, 0

    def seen(self) -> int:
        return self.did

    def taken(self) -> Any:
        return replaced(self, "is_taken", True)

    def state(self) -> int:
        return 1 + self.refused


@pytest.mark.parametrize("did", [NONE, 7])
@pytest.mark.parametrize("long", [False, True])
def test_a_kind_of_call_goes_the_other_way_from_the_first_that_may_be_recorded_on(monkeypatch, did, long):
    monkeypatch.setattr(graphs, "timed", lambda run, device: (run(), lambda: long))
    way, taken = Way(did), []

    def forward(x: torch.Tensor) -> torch.Tensor:
        taken.append(way.is_taken)
        return 2 * x

    recorder = Recorder()
    recorded = recorded_by(recorder, RecordedForward(forward, other_way=way))
    for count in (3, 4):  # another kind is not seen yet
        for _ in range(WARM_RUNS + 3):
            x = torch.randn(count)
            assert torch.equal(recorded(ONE, (x,), {}), 2 * x)
        assert taken[:WARM_RUNS] == [False] * WARM_RUNS
        assert len(taken) > WARM_RUNS
        assert set(taken[WARM_RUNS:]) == {did != NONE}
        assert not way.is_taken
        taken.clear()
    assert recorder.recorded == (0 if long else 2)


def go_on_ranks(rank: int, world_size: int) -> dict[str, Any]:
    """Run by `run_ranks`: whether each call of two kinds went another way, which only what all ranks do alike goes."""
    mesh = build_mesh(ParallelPlan(ulysses=world_size), rank, world_size)
    way, taken = Way(7), []

    def forward(x: torch.Tensor) -> torch.Tensor:
        taken.append(way.is_taken)
        return 2 * x

    def went(count: int, calls: int = WARM_RUNS + 2) -> list[bool]:
        taken.clear()
        for _ in range(calls):
            recorded(mesh, (torch.randn(count),), {})
        return list(taken)

    recorded = recorded_by(Recorder(), RecordedForward(forward, other_way=way))
    found: dict[str, Any] = {"alike": went(3)}
    way.did = rank
    found["unlike"] = went(4)
    way.did = 7
    way.refused = rank  # the first run of another kind could not be compiled, on one rank
    found["while one refuses"] = [went(5), went(3)]
    way.refused = 1
    found["all refuse"] = [went(6), went(3)]
    return found


def test_ranks_go_another_way_where_all_did_alike_and_none_does_otherwise_since():
    for found in run_ranks(2, f"{__name__}:go_on_ranks"):
        there = [False] * WARM_RUNS + [True]
        assert found["alike"][: WARM_RUNS + 1] == there
        assert not any(found["unlike"])
        new, old = found["while one refuses"]
        assert new[: WARM_RUNS + 1] == there
        assert old[:2] == [False, True]  # seen anew
        new, old = found["all refuse"]
        assert new[: WARM_RUNS + 1] == there
        assert old[:2] == [False, True]
