"""A run that fails on all ranks costs the job alone, where none of them can be waiting for another."""

from __future__ import annotations

import threading
from collections import Counter
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from parallel_runtime.mesh import launched as counting
from parallel_runtime.requests.requests import Finished
from workers.supervisor.jobs import ActiveJob
from workers.wire.frames import Frame
from workers.wire.protocol import Done, ErrorInfo, Failed, Launched, describe, of_all_ranks

WORLD, PAIR = "cpu of 0", "cpu of 3"


def running(ranks: int = 2) -> ActiveJob:
    return ActiveJob(1, ranks, "running")


def counts(world: int, pair: int | None = None, ranks: int = 2) -> Launched:
    everyone = {(tuple(range(ranks)), WORLD): world}
    return everyone if pair is None else {**everyone, ((0, 1), PAIR): pair}


def fail(
    job: ActiveJob,
    rank: int,
    launched: Launched | None,
    unbegun: bool = False,
    consequence: bool = False,
) -> None:
    text = f"Worker {rank} failed with ValueError: no."
    info = ErrorInfo("PoolError", text, "", rank, consequence=consequence)
    job.answer(Frame(Failed(1, rank, info, unbegun=unbegun, launched=launched), b"", None))


def be_done(job: ActiveJob, rank: int, launched: Launched | None = None) -> None:
    job.answer(Frame(Done(1, rank, Finished(), launched=launched), b"", None))


def test_ranks_that_launched_the_same_have_failed_alike():
    job = running()
    fail(job, 1, counts(7))
    assert job.outcome == "failing"
    fail(job, 0, counts(7))
    assert job.outcome == "alike"


def test_what_failed_on_one_rank_is_told_and_not_that_others_stopped_for_it():
    job = running()
    fail(job, 0, counts(7), consequence=True)
    fail(job, 1, counts(7))
    assert job.outcome == "alike"
    assert job.failure.rank == 1


@pytest.mark.parametrize("other", [counts(8), counts(7, 1), None])
def test_ranks_that_launched_something_else_or_do_not_know_have_not(other):
    job = running()
    fail(job, 0, counts(7))
    fail(job, 1, other)
    assert job.outcome == "broken"


def test_one_that_ran_the_job_through_was_not_alike():
    job = running()
    be_done(job, 1)
    fail(job, 0, counts(7))
    assert job.outcome == "broken"


def test_a_rank_outside_of_the_plan_has_nothing_to_fail_in():
    job = running(3)
    be_done(job, 2, counts(7, ranks=3))
    fail(job, 0, counts(7, 4, ranks=3))
    assert job.outcome == "failing"
    fail(job, 1, counts(7, 4, ranks=3))
    assert job.outcome == "alike"


def test_calls_that_no_rank_keeps_are_waited_for_as_long_as_it_takes():
    job = running()
    fail(job, 0, None, unbegun=True)
    assert job.outcome == "open"
    fail(job, 1, None, unbegun=True)
    assert job.outcome == "unbegun"


def test_the_artist_reads_what_the_model_said():
    info = describe(ValueError("no."), 1)
    told = of_all_ranks(info, "pool.log")
    assert (told.type, told.cause) == ("RequestError", "The model failed with ValueError: no.")
    assert "stays loaded" in told.fix
    typed = of_all_ranks(ErrorInfo("RequestError", "A cause.", "A fix.", 0), "pool.log")
    assert (typed.cause, typed.fix) == ("A cause.", "A fix.")


class Group:
    """A process group of ranks 0 and 1."""

    group_name = "5"
    _device_types = (torch.device("cpu"),)

    def _get_backend(self, device):
        return SimpleNamespace(_get_sequence_number_for_group=lambda: 7)


@pytest.fixture
def group(monkeypatch):
    group = Group()
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_process_group_ranks", lambda each: [0, 1])
    monkeypatch.setattr(dist.distributed_c10d, "_world", SimpleNamespace(pg_map={group: None}))
    return group


def test_messages_and_replays_are_counted_beside_what_torch_counts(group, monkeypatch):
    monkeypatch.setattr(counting, "TALLY", Counter())
    for given in (group, None, SimpleNamespace(group_name="gone")):
        counting.count(counting.MESSAGE, given)
    assert counting.launched(torch.device("cpu")) == {
        ((0, 1), "cpu of 5"): 7,
        ((0, 1), "messages of 5"): 1,
        ((0, 1), "replays of 5"): 0,
    }


def test_a_torch_that_does_not_count_is_told_of_as_unknown(group, monkeypatch):
    monkeypatch.setattr(Group, "_device_types", property(lambda self: self.elsewhere))
    assert counting.launched(torch.device("cpu")) is None


@pytest.mark.parametrize("error", [None, RuntimeError("an illegal memory access was encountered")])
def test_a_gpu_that_does_not_come_to_an_end_or_fails_is_told_of_as_unknown(monkeypatch, error):
    told = threading.Event()

    def synchronize(device):
        if error is not None:
            raise error
        told.wait(60)

    monkeypatch.setattr(counting, "_END_SECONDS", 0.1)
    monkeypatch.setattr(torch.cuda, "synchronize", synchronize)
    assert counting.launched(torch.device("cuda")) is None
    told.set()


def test_an_exchange_that_broke_off_leaves_nothing_to_count_by(monkeypatch):
    monkeypatch.setattr(counting, "_BROKEN_OFF", threading.Event())
    with counting.unbroken():
        pass
    assert counting.launched(torch.device("cpu")) is not None
    with pytest.raises(MemoryError), counting.unbroken():
        raise MemoryError
    assert counting.launched(torch.device("cpu")) is None
