"""What the supervisor makes of the ranks' answers, and when it hands out the next job. No process is started."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from parallel_runtime.requests.requests import Finished, Step
from workers.supervisor.job import ActiveJob
from workers.supervisor.jobs import Jobs
from workers.wire.error_info import ErrorInfo
from workers.wire.frames import Frame
from workers.wire.protocol import Cancel, Done, Failed, Job, Ready


def test_the_answer_goes_out_when_rank_0_has_it_and_the_next_job_waits_for_the_others():
    def done(rank: int) -> Frame:
        return Frame(Done(1, rank, Finished()), b"", None)

    prompt = ActiveJob(1, 2, "running", prompt=True)
    prompt.answer(done(0))
    assert prompt.answerable
    assert not prompt.finished
    prompt.answered = True
    prompt.answer(done(1))
    assert prompt.finished
    assert not prompt.answerable
    patient = ActiveJob(1, 2)
    for rank in range(2):
        patient.answer(Frame(Ready(1, rank), b"", None))
    patient.phase = "running"
    patient.answer(done(0))
    assert not patient.answerable
    patient.answer(done(1))
    assert patient.answerable


class Ends:
    """What `Jobs` talks to: keeps what it is told."""

    size = 2  # ranks
    hung_up = False

    def __init__(self) -> None:
        self.told: list[Any] = []

    async def hand_out(self, frame: Frame) -> None:
        self.told.append(frame.message)

    forward = hand_out

    async def tell(self, message: Any) -> None:
        self.told.append(message)

    send = tell


def test_the_supervisor_takes_answers_to_steps_that_it_has_not_handed_out_yet_and_hands_them_out_all_the_same():
    ranks, client = Ends(), Ends()
    jobs = Jobs(ranks, client, None, lambda failed: pytest.fail(str(failed)))  # type: ignore[arg-type]
    steps = [Frame(Job(number, Step(1)), b"", None) for number in (1, 2)]
    done = [[Frame(Done(number, rank, Finished()), b"", None) for rank in range(2)] for number in (1, 2)]

    async def work() -> None:
        await jobs.open()
        await jobs.add(steps[0])
        await jobs.answer(done[0][0])
        await jobs.answer(done[1][0])  # rank 0 is a step ahead of rank 1, and of what the supervisor knows
        await jobs.add(steps[1])
        await jobs.cancel(Cancel(2))
        assert [message.number for message in ranks.told] == [1]
        assert [message.number for message in client.told] == [1]
        await jobs.answer(done[0][1])
        assert ranks.told == [frame.message for frame in steps]
        assert client.told == [done[0][0].message, done[1][0].message]
        assert jobs.active is not None
        assert jobs.active.number == 2
        await jobs.answer(done[1][1])
        assert jobs.active is None
        assert not jobs.waiting

    asyncio.run(work())


def test_a_job_that_comes_after_a_rank_hung_up_is_given_to_nobody():
    ranks, client = Ends(), Ends()
    ranks.hung_up = True  # its last words are being read still
    jobs = Jobs(ranks, client, None, lambda failed: pytest.fail(str(failed)))  # type: ignore[arg-type]

    async def work() -> None:
        await jobs.open()
        adding = asyncio.create_task(jobs.add(Frame(Job(1, Step(1)), b"", None)))
        await asyncio.sleep(0.05)
        jobs.close()  # its end is known
        await adding

    asyncio.run(work())
    assert not ranks.told
    assert jobs.waiting == [1]


def test_a_step_ends_without_harm_only_if_every_rank_refused_it():
    def failed(rank: int, unbegun: bool = True) -> Frame:
        return Frame(Failed(1, rank, ErrorInfo("NotLoadedError", "", ""), unbegun=unbegun), b"", None)

    for frames, unbegun, broken in (
        ([failed(0)], False, False),
        ([failed(0), failed(1)], True, False),
        ([failed(0), failed(1, False)], False, True),
        ([failed(0), Frame(Done(1, 1, Finished()), b"", None)], False, True),
    ):
        job = ActiveJob(1, 2, "running", prompt=True)
        for frame in frames:
            job.answer(frame)
        assert (job.unbegun, job.broken) == (unbegun, broken)
