"""What ranks agree on between the two phases of a job."""

from __future__ import annotations

from parallel_runtime.requests.requests import Finished
from workers.supervisor.jobs import ActiveJob
from workers.wire.frames import Frame
from workers.wire.protocol import Done, Ready


def frame(message: Ready | Done) -> Frame:
    return Frame(message, b"", None)


def job_of(*offers: dict[str, int]) -> ActiveJob:
    job = ActiveJob(1, len(offers))
    for rank, offer in enumerate(offers):
        job.answer(frame(Ready(1, rank, offer)))
    return job


def test_the_least_of_all_offers_is_agreed() -> None:
    assert job_of({"memory": 3, "peers": 1}, {"memory": 2, "peers": 1}).agreed == {"memory": 2, "peers": 1}


def test_a_rank_that_offers_nothing_under_a_name_does_not_decide() -> None:
    assert job_of({"memory": 3}, {}, {"memory": 5, "other": 1}).agreed == {"memory": 3, "other": 1}


def test_equal_histories_show_in_a_number_and_its_negative() -> None:
    alike, unlike = job_of({"h": 4, "-h": -4}, {"h": 4, "-h": -4}), job_of({"h": 4, "-h": -4}, {"h": 7, "-h": -7})
    assert alike.agreed["h"] == -alike.agreed["-h"] == 4
    assert unlike.agreed["h"] != -unlike.agreed["-h"]


def test_an_answer_to_another_phase_offers_nothing() -> None:
    job = job_of({"h": 4})
    job.phase = "running"
    job.answer(frame(Ready(1, 0, {"h": 9})))
    job.answer(frame(Done(1, 0, Finished())))
    assert job.agreed == {"h": 4}
