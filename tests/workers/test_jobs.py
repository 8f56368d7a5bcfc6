"""What the supervisor makes of the ranks' answers, and when it hands out the next job. No process is started."""

from __future__ import annotations

import asyncio
import socket
from typing import Any, get_args

import pytest

from parallel_runtime.requests.requests import Finished, Step
from workers.supervisor.jobs import ActiveJob, Jobs
from workers.supervisor.supervisor import OF_CLIENT, OF_RANK
from workers.wire.connection import Endpoint
from workers.wire.frames import Frame, encode_header
from workers.wire.protocol import (
    Abandon,
    Cancel,
    Done,
    ErrorInfo,
    Failed,
    Heartbeat,
    Hello,
    Job,
    Message,
    Run,
    Shutdown,
    Status,
)


class Ends:
    """What `Jobs` talks to: keeps what it is told."""

    size = 2  # ranks
    complete = True

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


def test_an_answer_goes_out_when_all_ranks_are_through_and_the_next_job_may_come():
    ranks, client = Ends(), Ends()
    jobs = Jobs(ranks, client, None, lambda failed: pytest.fail(str(failed)))  # type: ignore[arg-type]
    done = [[Frame(Done(number, rank, Finished()), b"", None) for rank in range(2)] for number in (1, 2)]

    async def work() -> None:
        for number, answers in enumerate(done, 1):
            job = Job(number, Step(1))
            await jobs.begin(Frame(job, b"", None), job)
            await jobs.cancel(Cancel(number + 1))  # which is another one
            await answer(jobs, answers[0])
            assert [message.number for message in ranks.told] == [*range(1, number + 1)]
            assert len(client.told) == number - 1
            await answer(jobs, answers[1])
            assert client.told[number - 1] == answers[0].message
            assert jobs.active is None

    asyncio.run(work())


def test_a_job_that_comes_when_a_rank_is_known_to_have_ended_is_given_to_nobody():
    ranks, client = Ends(), Ends()
    jobs = Jobs(ranks, client, None, lambda failed: pytest.fail(str(failed)))  # type: ignore[arg-type]
    job = Job(1, Step(1))
    jobs.close()
    asyncio.run(jobs.begin(Frame(job, b"", None), job))
    assert not ranks.told
    assert jobs.active is not None
    assert jobs.active.unread


@pytest.mark.parametrize("sent", ["before it ended", "afterwards"])
def test_what_a_rank_that_ended_has_not_read_is_known(sent):
    ours, theirs = socket.socketpair()
    job = Job(1, Step(1))
    frame = Frame(job, encode_header(job), None)

    async def work() -> bool:
        endpoint = Endpoint(ours)
        theirs.sendall(b"x" * 1000)  # what it said before
        if sent == "before it ended":
            await endpoint.forward(frame)
        theirs.close()
        if sent == "afterwards":
            await endpoint.forward(frame)
        for _ in range(1000):
            await asyncio.get_running_loop().sock_recv(ours, 1)
        assert await endpoint.receive() is None
        return endpoint.left_unread

    assert asyncio.run(work())
    ours.close()


def test_a_step_ends_without_harm_only_if_every_rank_refused_it():
    def failed(rank: int, unbegun: bool = True) -> Frame:
        return Frame(Failed(1, rank, ErrorInfo("NotLoadedError", "", ""), unbegun=unbegun), b"", None)

    for frames, outcome in (
        ([failed(0)], "open"),
        ([failed(0), failed(1)], "unbegun"),
        ([failed(0), failed(1, False)], "broken"),
        ([failed(0), Frame(Done(1, 1, Finished()), b"", None)], "broken"),
    ):
        job = ActiveJob(1, 2, "running")
        for frame in frames:
            job.answer(frame)
        assert job.outcome == outcome


def test_every_message_has_somebody_who_answers_it():
    to_supervisor = {*OF_CLIENT, *OF_RANK, Heartbeat, Shutdown}
    by_others = {Hello, Run, Abandon, Status}  # of a connection's begin, the ranks', the client's
    assert to_supervisor | by_others == set(get_args(Message))
    assert not to_supervisor & by_others
