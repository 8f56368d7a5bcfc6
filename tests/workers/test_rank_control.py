"""What a rank sends of a job's steps, and when: on a GPU the last one's message is held back, and never comes late."""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from parallel_runtime.denoising import progress
from parallel_runtime.engine.rank_state import Prepared
from parallel_runtime.requests.control import Cancelled, Control
from parallel_runtime.requests.requests import Finished, Release
from workers.rank import rank as rank_module
from workers.rank.rank import Rank, RankControl
from workers.supervisor.jobs import StallWatch
from workers.wire.frames import Frame
from workers.wire.protocol import Doing, Done, Failed, Job, Progress

STEPS = 4
JOB = Job(7, Release("m"), ())


class Outgoing:
    """A connection that keeps what is sent."""

    def __init__(self) -> None:
        self.sent: list[tuple[Any, bytes]] = []

    def send(self, message: Any, buffers: Any = ()) -> None:
        self.sent.append((message, b"".join(buffers)))

    @property
    def kinds(self) -> list[str]:
        """Messages by name, with the number of a step."""
        return [f"step {m.step}" if isinstance(m, Progress) else type(m).__name__ for m, _ in self.sent]


class Waiting:
    """A step on a device that finishes when it is let."""

    def __init__(self, denoised: torch.Tensor | None, device: torch.device, release: Callable[[], Any]):
        self._denoised = None if denoised is None else denoised.clone()
        self._release = release

    def wait(self) -> torch.Tensor | None:
        self._release()
        return self._denoised


def make_rank(monkeypatch: Any, device: str = "cuda", release: Callable[[], Any] = lambda: None) -> Rank:
    """Rank 0 of one, whose device is a stand-in with steps of no length."""
    monkeypatch.setattr(progress, "QueuedOnGpu", partial(Waiting, release=release))
    monkeypatch.setattr(progress, "time", SimpleNamespace(perf_counter=lambda: 0.0))
    residency = SimpleNamespace(pulse=SimpleNamespace(count=0))
    engine: Any = SimpleNamespace(
        rank=0, world_size=1, device=torch.device(device), free=lambda: None, residency=residency
    )
    outgoing: Any = Outgoing()
    return Rank(outgoing, engine)


def run_job(rank: Rank, end: Callable[[int], None] = lambda step: None, steps: int = STEPS) -> Outgoing:
    """A job whose steps overwrite one latent; `end(step)` may raise after each."""

    def work(tensors: Any, control: Control, agreed: Any) -> Any:
        latent = torch.zeros(1)
        for step in range(steps):
            control.progress(step, steps, latent.fill_(step))
            if control.all_stop(None):
                raise Cancelled
            end(step)
        return Finished(), {"latent": latent}

    rank._run(Frame(JOB, b"", None), JOB, Prepared(run_it=work), {})
    outgoing: Any = rank.connection
    return outgoing


@pytest.mark.parametrize("device", ["cuda", "cpu"])
def test_all_steps_are_told_of_before_the_end_with_their_previews(monkeypatch, device):
    outgoing = run_job(make_rank(monkeypatch, device))
    assert outgoing.kinds == ["step 0", "step 1", "step 2", "step 3", "Done"]
    previews = [torch.frombuffer(bytearray(payload), dtype=torch.float32).item() for _, payload in outgoing.sent]
    assert previews == [0, 1, 2, 3, 3]


@pytest.mark.parametrize(("device", "told"), [("cuda", ["step 0"]), ("cpu", ["step 0", "step 1"])])
def test_a_cancelled_jobs_end_is_its_last_message(monkeypatch, device, told):
    rank = make_rank(monkeypatch, device)

    def cancel(step: int) -> None:
        rank.inbox.cancelled = 7

    outgoing = run_job(rank, cancel)
    assert outgoing.kinds == [*told, "Done"]
    done, payload = outgoing.sent[-1]
    assert isinstance(done, Done)
    assert done.cancelled
    assert not payload


def test_a_failed_jobs_end_is_its_last_message(monkeypatch):
    def fail(step: int) -> None:
        if step == 2:
            raise RuntimeError("planted")

    assert run_job(make_rank(monkeypatch), fail).kinds == ["step 0", "step 1", "Failed"]


def test_a_step_that_fails_on_the_gpu_when_the_host_is_through_fails_the_job(monkeypatch):
    waited = []

    def release() -> None:
        waited.append(None)
        if len(waited) == STEPS:
            raise RuntimeError("CUDA error: planted")

    outgoing = run_job(make_rank(monkeypatch, release=release))
    assert outgoing.kinds == ["step 0", "step 1", "step 2", "Failed"]
    failed, _ = outgoing.sent[-1]
    assert isinstance(failed, Failed)
    assert "planted" in failed.error.cause


def test_the_next_job_does_not_tell_of_a_cancelled_ones_step(monkeypatch):
    rank = make_rank(monkeypatch)
    rank.inbox.cancelled = 7
    run_job(rank, steps=2)
    rank.inbox.cancelled = None
    before = len(rank.connection.sent)
    assert run_job(rank, steps=2).kinds[before:] == ["step 0", "step 1", "Done"]


def test_a_rank_that_waits_for_its_gpu_for_ever_stalls(monkeypatch):
    finish = threading.Event()
    rank = make_rank(monkeypatch, release=lambda: finish.wait(20))
    control = RankControl(rank, JOB)
    worker = threading.Thread(target=control.progress, args=(0, STEPS))
    worker.start()
    try:
        watch = StallWatch(floor=10)
        watch.start(1, now=0)
        stall = None
        for second in range(30):
            watch.beat(0, rank.heartbeat.progress, second)  # what the heartbeat's thread sends meanwhile
            stall = stall or watch.tick(second)
    finally:
        finish.set()
        worker.join()
    assert stall is not None
    assert stall[0] == 0


def test_a_load_is_told_of_a_few_times_a_second_and_hears_a_cancel(monkeypatch):
    rank = make_rank(monkeypatch)
    now = [10.0]
    monkeypatch.setattr(rank_module.time, "monotonic", lambda: now[0])
    control = RankControl(rank, JOB)
    for moment, done in ((10.0, 0), (10.1, 1), (10.3, 2), (10.5, 3), (10.6, 4)):
        now[0] = moment
        control.loading(done, 9)
    connection: Any = rank.connection
    assert [message for message, _ in connection.sent] == [Doing(7, "weights", done, 9) for done in (0, 2, 4)]
    rank.inbox.cancelled = 7
    with pytest.raises(Cancelled):
        control.loading(5, 9)
