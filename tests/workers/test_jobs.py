"""What the supervisor makes of the ranks' answers, and when it hands out the next job. No process is started."""

from __future__ import annotations

import asyncio
from typing import Any, get_args

import pytest

from parallel_runtime.requests.requests import Finished, Step
from workers.supervisor.job import ActiveJob
from workers.supervisor.jobs import Jobs
from workers.supervisor.supervisor import OF_CLIENT, OF_RANK
from workers.wire.error_info import ErrorInfo
from workers.wire.frames import Frame
from workers.wire.protocol import Abandon, Cancel, Done, Failed, Heartbeat, Hello, Job, Message, Run, Status


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


async def answer(jobs: Jobs, frame: Frame) -> None:
    await jobs.answer(frame, frame.message)  # type: ignore[arg-type]


def test_an_answer_goes_out_and_the_next_job_begins_when_all_ranks_are_through():
    ranks, client = Ends(), Ends()
    jobs = Jobs(ranks, client, None, lambda failed: pytest.fail(str(failed)))  # type: ignore[arg-type]
    steps = [Frame(Job(number, Step(1)), b"", None) for number in (1, 2, 3)]
    done = [[Frame(Done(number, rank, Finished()), b"", None) for rank in range(2)] for number in (1, 3)]

    async def work() -> None:
        await jobs.open()
        for step in steps:
            await jobs.add(step)
        await jobs.cancel(Cancel(2))  # no rank has heard of it
        assert [message.number for message in client.told] == [2]
        await answer(jobs, done[0][0])
        assert [message.number for message in ranks.told] == [1]
        assert len(client.told) == 1
        await answer(jobs, done[0][1])
        assert [message.number for message in ranks.told] == [1, 3]
        assert client.told[1:] == [done[0][0].message]
        for each in done[1]:
            await answer(jobs, each)
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
        job = ActiveJob(1, 2, "running")
        for frame in frames:
            job.answer(frame)
        assert (job.unbegun, job.broken) == (unbegun, broken)


def test_every_message_has_somebody_who_answers_it():
    to_supervisor = {*OF_CLIENT, *OF_RANK, Heartbeat}
    by_others = {Hello, Run, Abandon, Status}  # of a connection's begin, the ranks', the client's
    assert to_supervisor | by_others == set(get_args(Message))
    assert not to_supervisor & by_others
