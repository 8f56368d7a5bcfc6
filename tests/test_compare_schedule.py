"""benchmarks/compare.py: cases share the machine without sharing a GPU, and all get their turn."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.rivals import schedule
from benchmarks.rivals.case import Case
from benchmarks.rivals.launch import Run, environment
from benchmarks.rivals.plan import SETS, Setting, plan_cases, plan_set
from benchmarks.rivals.schedule import Gpus, Outcome, Queue, Turn, estimate, order_turns


def case_of(ranks: int, p2p: bool = True) -> Case:
    """A case on so many GPUs."""
    (case,) = plan_cases(["diffusers"], [ranks], [1024], Setting(False, "", 100, p2p))
    return case


def always(case: Case) -> float:
    """There is time for every case."""
    return 100.0


class Machine:
    """Stands for processes on GPUs; time passes with each look at all of them."""

    def __init__(self, lengths: dict[Case, int]) -> None:
        self.lengths = lengths
        self.going: list[Played] = []
        self.begun: list[Played] = []
        self.most = 0

    def begin(self, case: Case, gpus: tuple[int, ...]) -> Played:
        played = Played(self, case, gpus)
        self.begun.append(played)
        return played


class Played:
    """A case that ends after some looks; one that is not ended keeps its GPUs."""

    def __init__(self, machine: Machine, case: Case, gpus: tuple[int, ...]) -> None:
        self.machine, self.case, self.gpus = machine, case, gpus
        self.left, self.ended = machine.lengths[case], False

    def go(self, limit: float) -> None:
        others = [gpu for other in self.machine.going for gpu in other.gpus]
        assert not set(others) & set(self.gpus), "a GPU has two cases"
        assert len(set(self.gpus)) == self.case.ranks
        if self.case.uses_host or any(other.case.uses_host for other in self.machine.going):
            assert not self.machine.going, "what uses the host has company"
        self.machine.going.append(self)
        self.machine.most = max(self.machine.most, len(self.machine.going))

    def poll(self) -> Outcome | None:
        self.left -= 1
        return ({"reason": "it fails"}, None) if self.left <= 0 else None

    def end(self) -> None:
        self.ended = True
        if self in self.machine.going:
            self.machine.going.remove(self)


def play(cases: list[Case], lengths: list[int], gpus: int, alone: bool = False) -> tuple[Machine, list[Turn]]:
    """Run cases that fail after so many looks each; return whose turns ended, in that order."""
    named = [replace(case, rival=f"{case.rival} {number}") for number, case in enumerate(cases)]
    machine = Machine(dict(zip(named, lengths, strict=True)))
    ended: list[Turn] = []
    turns = order_turns(named, gpus, alone)
    Queue(turns, Gpus(gpus), machine.begin, always, lambda turn, outcome: ended.append(turn)).run()
    assert sorted(turn.place for turn in ended) == list(range(len(cases)))
    assert all(played.ended for played in machine.begun)
    return machine, ended


@pytest.fixture(autouse=True)
def no_waiting(monkeypatch):
    monkeypatch.setattr(schedule, "POLL", 0.0)


@settings(deadline=None, max_examples=60)
@given(
    st.lists(st.tuples(st.sampled_from([1, 2, 3, 4, 8]), st.booleans(), st.integers(1, 9)), max_size=12),
    st.sampled_from([1, 2, 4]),
    st.booleans(),
)
def test_no_gpu_has_two_cases_and_every_case_gets_its_turn(wanted, gpus, alone):
    machine, _ = play([case_of(ranks, p2p) for ranks, p2p, _ in wanted], [length for *_, length in wanted], gpus, alone)
    assert machine.most <= (1 if alone else gpus)


def test_cases_of_few_gpus_fill_the_machine():
    assert play([case_of(1)] * 8, [5] * 8, 4)[0].most == 4
    assert play([case_of(2)] * 4, [5] * 4, 4)[0].most == 2
    assert play([case_of(2, p2p=False)] * 4, [5] * 4, 4)[0].most == 1


def test_a_case_that_needs_every_gpu_starts_its_processes_before_they_are_free_and_begins_when_they_are():
    machine = Machine({case_of(1): 5, case_of(4): 1})
    turns = order_turns([case_of(1), case_of(4)], 4)
    Queue(turns, Gpus(4), machine.begin, always, lambda turn, outcome: None).run()
    assert [played.case.ranks for played in machine.begun] == [1, 4]
    assert len(machine.begun[1].gpus) == 4


def test_all_that_runs_is_ended_when_the_run_is_broken_off():
    machine = Machine({case_of(1): 5, case_of(2): 9, case_of(4): 9})

    def broken(turn: Turn, outcome: Outcome) -> None:
        raise KeyboardInterrupt

    turns = order_turns([case_of(1), case_of(2), case_of(4)], 4)
    with pytest.raises(KeyboardInterrupt):
        Queue(turns, Gpus(4), machine.begin, always, broken).run()
    assert len(machine.begun) == 3
    assert all(played.ended for played in machine.begun)


def test_what_there_is_no_time_for_has_no_processes_left_that_were_started_ahead():
    machine = Machine({case_of(1): 3, case_of(4): 3})
    told: list[Any] = []

    def tell(turn: Turn, outcome: Outcome) -> None:
        told.append(outcome[0]["reason"])

    turns = order_turns([case_of(1), case_of(4)], 4)
    Queue(turns, Gpus(4), machine.begin, lambda case: 0.0 if told else 100.0, tell).run()
    assert len(machine.begun) == 2
    assert told == ["it fails", "left out, as the seconds for all were over"]
    assert all(played.ended for played in machine.begun)


@pytest.mark.parametrize("name", SETS)
@pytest.mark.parametrize("p2p", [True, False])
def test_the_plan_s_total_is_between_all_gpus_busy_and_one_case_after_the_other(name, p2p):
    turns = order_turns(plan_set(name, Setting(False, "", 100, p2p), None, None, None), 4)
    ends = estimate(turns, 4, ahead=False)
    busy = sum(turn.seconds * turn.width for turn in turns) / 4
    assert busy <= max(ends) < sum(turn.seconds for turn in turns)
    assert max(estimate(turns, 4, ahead=True)) <= max(ends)


def test_a_rank_sees_its_case_s_gpus_alone(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5,6,7")
    told = environment(case_of(2), 1, (2, 3), machine=4)
    assert told["CUDA_VISIBLE_DEVICES"] == "6,7"
    assert told["LOCAL_RANK"] == "1"
    assert "NCCL_P2P_DISABLE" not in told
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    told = environment(case_of(2, p2p=False), 0, (2, 3), machine=4)
    assert told["CUDA_VISIBLE_DEVICES"] == "2,3"
    assert told["NCCL_P2P_DISABLE"] == "1"


@pytest.fixture
def ended_run(monkeypatch) -> Callable[..., Run]:
    """A run whose processes are shells that do what is told, once the case is there."""

    def start(command: str, limit: float = 20.0, grace: float = 15.0) -> Run:
        class Shell(Run):
            def _start(self, rank: int, machine: int) -> Any:
                import subprocess

                (self._folder / f"{rank}.log").touch()
                wait = f"cd {self._folder}; while [ ! -e case.json ]; do sleep 0.02; done; "
                return subprocess.Popen(["sh", "-c", wait + command], start_new_session=True)

        monkeypatch.setattr("benchmarks.rivals.launch.GRACE", grace)
        run = Shell(case_of(1), (0,), 1)
        run.go(limit)
        return run

    return start


def outcome_of(run: Run) -> Outcome:
    """Wait for it, and end it."""
    try:
        while (outcome := run.poll()) is None:
            pass
        return outcome
    finally:
        run.end()


def test_a_result_counts_though_a_rank_hangs_or_fails_on_the_way_out(ended_run, tmp_path):
    import torch
    from safetensors.torch import save_file

    save_file({"latent": torch.ones(1)}, tmp_path / "latent.safetensors")
    result = f"cp {tmp_path}/latent.safetensors .; echo '{json.dumps({'ms_per_step': 4.0})}' > row.json; "
    result += "echo '{\"peak_gib\": 2.5}' > memory-0.json; "
    for end, grace in (("sleep 60", 0.2), ("exit 3", 15.0), ("exit 0", 15.0)):
        row, latent = outcome_of(ended_run(result + end, grace=grace))
        assert row == {"ms_per_step": 4.0, "peak_gib": 2.5}
        assert latent is not None


def test_a_rank_that_ends_without_a_result_is_a_reason(ended_run):
    assert outcome_of(ended_run("exit 3"))[0]["reason"] == "rank 0 ended with 3"
    assert outcome_of(ended_run("exit 0"))[0]["reason"] == "all ranks ended, but rank 0 measured nothing"
    assert outcome_of(ended_run("echo no GPU > reason-0.txt; exit 1"))[0]["reason"] == "no GPU"
    assert outcome_of(ended_run("sleep 60", limit=0.2))[0]["reason"] == "took longer than 0.2 s"
