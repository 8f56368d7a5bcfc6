"""benchmarks/rivals/measure.py: what is timed is the run as a whole, and no rival is made to wait between its steps."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from benchmarks.rivals import measure, ours
from benchmarks.rivals.case import Case
from benchmarks.rivals.task import Task
from benchmarks.step_control import StepControl

CPU = torch.device("cpu")


@pytest.fixture
def task() -> Task:
    case = Case("ours", ranks=1, size=64, steps=4, warm=3, compile="", tiny=True, comfyui="", limit=100)
    return Task(case, 0, CPU)


class Clock:
    """A rival whose steps take as long as said, and what asks for the time after having waited for the GPU."""

    def __init__(self, seconds: list[float], setup: float = 0.0):
        self.now, self.waits = 0.0, 0
        self._seconds, self._setup = seconds, setup

    def wait(self, device: torch.device) -> float:
        self.waits += 1
        return self.now

    def sample(self, x: torch.Tensor, sigmas: torch.Tensor, tick: Callable[[], None]) -> torch.Tensor:
        assert len(sigmas) == len(self._seconds) + 1
        self.now += self._setup
        for seconds in self._seconds:
            self.now += seconds
            tick()
        return x


def test_the_timed_run_is_waited_for_at_its_two_ends_alone(monkeypatch, task):
    clock = Clock([1.0, 2.0, 4.0, 8.0], setup=0.5)
    monkeypatch.setattr(measure, "_now", clock.wait)
    latent, seconds = measure._time(clock.sample, task)
    assert (seconds, clock.waits) == (15.5, 2)
    assert torch.equal(latent, task.latent())


def test_the_first_step_is_timed_in_the_run_that_compiles(monkeypatch, task):
    clock = Clock([90.0, 1.0, 1.0])
    monkeypatch.setattr(measure, "_now", clock.wait)
    assert measure._warm(clock.sample, task) == 90.0
    assert clock.waits == 2


def test_ours_tells_of_every_step_with_its_preview_as_in_the_pool(monkeypatch, task):
    previews: list[Any] = []

    class Listening(StepControl):
        def progress(self, step: int, total: int, denoised: torch.Tensor | None = None) -> None:
            previews.append((step, total, denoised))
            super().progress(step, total, denoised)

    monkeypatch.setattr(ours, "StepControl", Listening)
    ticks: list[None] = []
    with torch.no_grad():
        latent = ours.build(task).sample(task.latent(), torch.linspace(1, 0, 4), lambda: ticks.append(None))
    assert len(ticks) == 3
    assert [told[:2] for told in previews] == [(0, 3), (1, 3), (2, 3)]
    assert all(denoised.shape == latent.shape for *_, denoised in previews)
