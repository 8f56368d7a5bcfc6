"""Steps are told of once the GPU has finished them, and short ones without keeping it waiting. Here it is a clock."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace

import pytest
import torch

from parallel_runtime.denoising import progress
from parallel_runtime.denoising.progress import StepTelling

GPU = torch.device("cuda", 0)


class Device:
    """Computes queued steps one after the other, each as long as said; waiting for one moves the clock to its end."""

    def __init__(self, seconds: Sequence[float], telling: float = 0.0):
        self.now = 0.0
        self.events: list[tuple[str, int]] = []
        self.previews: list[torch.Tensor | None] = []
        self._seconds, self._telling, self._free = seconds, telling, 0.0
        self._queued = 0

    def queue(self, denoised: torch.Tensor | None, device: torch.device) -> Step:
        """Begin when the one before is over. What is copied is what the source held at that point of the queue."""
        self.events.append(("queued", self._queued))
        self._free = max(self.now, self._free) + self._seconds[self._queued]
        self._queued += 1
        return Step(self, self._free, None if denoised is None else denoised.clone())

    def tell(self, index: int, total: int, denoised: torch.Tensor | None) -> None:
        """A message, which takes a while."""
        assert total == len(self._seconds)
        self.now += self._telling
        self.events.append(("told", index))
        self.previews.append(denoised)

    def telling(self, monkeypatch: pytest.MonkeyPatch) -> StepTelling:
        """Of this device's steps, on its clock."""
        monkeypatch.setattr(progress, "QueuedOnGpu", self.queue)
        monkeypatch.setattr(progress, "time", SimpleNamespace(perf_counter=lambda: self.now))
        return StepTelling(self.tell, GPU)

    def run(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """All steps, the latent overwritten in place by each."""
        told = self.telling(monkeypatch)
        latent = torch.zeros(2)
        for index in range(len(self._seconds)):
            told.step(index, len(self._seconds), latent.fill_(index))
        self.at_end = [index for kind, index in self.events if kind == "told"]
        told.flush()


class Step:
    """A step of `Device`."""

    def __init__(self, device: Device, end: float, denoised: torch.Tensor | None):
        self._device, self._end, self._denoised = device, end, denoised

    def wait(self) -> torch.Tensor | None:
        """Until its end."""
        self._device.now = max(self._device.now, self._end)
        return self._denoised


DURATIONS = {
    "short": [0.04] * 6,
    "slow": [1.0] * 4,
    "compiling": [90.0, 0.04, 0.04, 0.04],
    "one": [0.04],
    "slower and faster": [0.04, 0.04, 0.04, 1.0, 1.0, 0.04, 0.04, 0.04],
}


@pytest.mark.parametrize("seconds", DURATIONS.values(), ids=DURATIONS)
def test_every_step_is_told_of_once_in_order_with_its_own_preview(monkeypatch, seconds):
    device = Device(seconds)
    device.run(monkeypatch)
    assert [index for kind, index in device.events if kind == "told"] == list(range(len(seconds)))
    assert [preview[0].item() for preview in device.previews] == list(range(len(seconds)))


@pytest.mark.parametrize(
    ("seconds", "late"),
    [
        ("short", [1, 2, 3, 4, 5]),
        ("slow", []),
        ("compiling", [2, 3]),
        ("one", []),
        # Step 3 is queued before it can be known that it is slow; 4 and 5 are waited for, 5 shows that steps are short.
        ("slower and faster", [1, 2, 3, 6, 7]),
    ],
)
def test_a_step_is_told_of_when_the_next_is_queued_where_the_one_before_was_short_and_at_once_elsewhere(
    monkeypatch, seconds, late
):
    device = Device(DURATIONS[seconds])
    device.run(monkeypatch)
    last = len(DURATIONS[seconds]) - 1
    place = {event: number for number, event in enumerate(device.events)}
    told_late = [
        index
        for index in range(last + 1)
        if (place["told", index] > place["queued", index + 1] if index < last else index not in device.at_end)
    ]
    assert told_late == late
    assert all(place["told", index] < place["queued", index + 2] for index in range(last - 1))


def test_the_gpu_computes_short_steps_without_a_pause_but_the_first(monkeypatch):
    message = 0.01
    device = Device(DURATIONS["short"], telling=message)
    device.run(monkeypatch)
    assert device.now == pytest.approx(sum(DURATIONS["short"]) + 2 * message)  # the first message, and the last


def test_without_a_preview_steps_are_waited_for_all_the_same(monkeypatch):
    device = Device([0.04] * 3)
    telling = device.telling(monkeypatch)
    for index in range(3):
        telling.step(index, 3)
    assert device.now == pytest.approx(0.08)
    assert device.previews == [None, None]


def test_on_a_cpu_every_step_is_told_of_at_once_with_the_tensor_itself(monkeypatch):
    told = []
    monkeypatch.setattr(progress, "QueuedOnGpu", None)
    telling = StepTelling(lambda *given: told.append(given), torch.device("cpu"))
    for index in range(3):
        denoised = torch.zeros(1)
        telling.step(index, 3, denoised)
        assert len(told) == index + 1
        assert told[-1][2] is denoised
    telling.flush()
    assert len(told) == 3


@pytest.fixture
def waiting_is_an_error():
    """PyTorch raises where a call waits for the GPU."""
    torch.cuda.set_sync_debug_mode("error")
    yield
    torch.cuda.set_sync_debug_mode("default")


@pytest.mark.gpu
def test_a_real_gpu_is_one_step_behind_the_host_and_each_preview_is_of_its_step(request):
    x = torch.zeros(2, 3, 4, device=GPU).transpose(0, 1)
    told, counts = [], []
    telling = StepTelling(lambda index, total, denoised: told.append((index, denoised)), GPU)
    request.getfixturevalue("waiting_is_an_error")
    for index in range(6):
        torch.cuda._sleep(20_000_000)  # cycles: about 10 ms
        telling.step(index, 6, x.fill_(index))
        counts.append(len(told))
    telling.flush()
    assert counts == [1, 1, 2, 3, 4, 5]
    assert all(torch.equal(denoised, torch.full((3, 2, 4), float(index))) for index, denoised in told)
