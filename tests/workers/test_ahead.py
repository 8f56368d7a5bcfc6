"""A loop that ranks begin with before it is asked for: who asks for the very same gets it, all others end it."""

from __future__ import annotations

import time

import pytest
import torch

from parallel_runtime.errors import PoolLostError, RequestError
from parallel_runtime.patching.patch_data import UNPATCHED
from parallel_runtime.requests.control import Cancelled
from tests.patience import SOON, wait_until
from tests.workers.loops import make_loop

pytestmark = pytest.mark.slow
STEPS = 60  # of 20 ms


def loop(fault: str = "fine", steps: int = STEPS, first: float = 0.0, context: float = 0.0, cfg: float = 1.0):
    x = torch.arange(6.0).reshape(1, 6) + first
    return make_loop(fault, torch.linspace(1, 0, steps + 1), x, {0: {"context": torch.full((1, 1, 1), context)}}, cfg)


@pytest.fixture
def pool(faulty_pool):
    """One that has run a loop, with its conditioning."""
    pool = faulty_pool()
    pool.client._models.held = None  # these ranks do not tell; a test before may have thought that they lost all
    pool.client.sample(pool.model(), loop(steps=2))
    return pool


def begin(pool, request) -> bool:
    return pool.client.begin_ahead(pool.model(), request, UNPATCHED)


def sample(pool, request, **more):
    return pool.client.sample(pool.model(), request, **more)


def jobs(pool) -> int:
    """How many were sent to the ranks."""
    return pool.pool.life._job.number


def test_who_asks_for_the_same_gets_it_with_all_its_steps(pool):
    assert begin(pool, loop(first=1))
    wait_until(lambda: pool.client.status().state == "idle", SOON)
    before, began, steps = jobs(pool), time.monotonic(), []
    latent = sample(pool, loop(first=1), on_progress=lambda step, *_: steps.append(step))
    assert time.monotonic() - began < STEPS * 0.02 / 2
    assert torch.equal(latent, loop(first=1).x)
    assert jobs(pool) == before
    assert steps == list(range(STEPS))
    assert len(pool.client.ahead.served.steps) == STEPS
    pool.check_works()
    assert pool.client.ahead.served is None


@pytest.mark.parametrize("other", [loop(first=2), loop(steps=3), loop(context=1), loop(cfg=2.0)])
def test_another_request_ends_it_and_gets_its_own(pool, other):
    assert begin(pool, loop())
    before = pool.client.status().pids
    assert torch.equal(sample(pool, other), other.x)
    assert pool.client.ahead.served is None
    assert pool.client.status().pids == before


def test_nobody_waits_for_the_end_of_a_loop_that_nobody_wants(pool):
    assert begin(pool, loop(steps=100_000))
    began = time.monotonic()
    pool.client.release(pool.model())
    assert time.monotonic() - began < 5
    pool.check_works()


def test_it_has_no_conditioning_of_its_own(pool, monkeypatch):
    assert not begin(pool, loop(context=3))
    send, sent = pool.pool.begin, []
    monkeypatch.setattr(pool.pool, "begin", lambda submission: sent.append(submission.tensors) or send(submission))
    assert torch.equal(sample(pool, loop(context=3)), loop().x)
    assert any(torch.equal(each, torch.full((1, 1, 1), 3.0)) for each in sent[0].values())


def test_who_is_cancelled_while_it_ends_has_sent_nothing(pool, monkeypatch):
    running, sent = pool.pool, []
    send, settle = running.begin, running.settle
    assert begin(pool, loop(steps=100_000))
    stops = iter([lambda: None, _cancel])  # before the request, and when it has ended the loop
    monkeypatch.setattr(running, "settle", lambda: next(stops, settle)())
    with pytest.raises(Cancelled):
        sample(pool, loop(context=4))
    monkeypatch.setattr(running, "begin", lambda submission: sent.append(submission.tensors) or send(submission))
    assert torch.equal(sample(pool, loop(context=4)), loop().x)
    assert any(torch.equal(each, torch.full((1, 1, 1), 4.0)) for each in sent[0].values())


def _cancel() -> None:
    raise Cancelled


def test_it_brings_no_weights_back_and_starts_no_pool(pool):
    pool.client._models.held = {}  # they are parked
    assert not begin(pool, loop())
    pool.client.close()
    assert not begin(pool, loop())
    assert pool.client.pool is None
    pool.client.start()
    assert not begin(pool, loop())
    pool.check_works()


def test_it_waits_for_no_other_that_was_cancelled(pool):
    seen: list[int] = []
    pool.client.keeper.pool.life.state = "cancelled"
    assert not begin(pool, loop())
    pool.client.keeper.pool.life.state = "idle"
    assert begin(pool, loop(steps=100_000))
    before = jobs(pool)
    with pytest.raises(Cancelled):
        sample(pool, loop(steps=100_000), on_progress=lambda *_: seen.append(1), should_cancel=lambda: len(seen) > 3)
    assert jobs(pool) == before
    pool.check_works()


def test_a_failure_of_it_is_nobodys(pool, monkeypatch):
    running = pool.pool
    finish, failures = running.finish, [RequestError("No.", "Try."), PoolLostError("Died.", "Again.")]

    def failing(job, submission):
        reply = finish(job, submission)
        if pool.client.ahead.served and failures:
            raise failures.pop()
        return reply

    monkeypatch.setattr(running, "finish", failing)
    while failures:
        left = len(failures)
        assert begin(pool, loop(steps=2))
        assert torch.equal(sample(pool, loop(steps=2)), loop().x)
        assert len(failures) == left - 1


def test_a_pool_that_dies_over_it_is_replaced_for_the_next(pool):
    first = pool.pool.pid
    assert begin(pool, loop("exit 1 3"))
    wait_until(lambda: not pool.client.keeper.pool.life.alive, SOON)
    pool.check_works()
    assert pool.pool.pid != first
