"""What a plan is said to do, and why."""

from __future__ import annotations

from dataclasses import replace

import pytest

from benchmarks.flux_facts import FLUX_DEV, flux_request
from parallel_runtime.config import ParallelConfig
from parallel_runtime.planning.explanation import explain
from parallel_runtime.planning.plan import choose
from parallel_runtime.planning.wish import Wish
from parallel_runtime.requests.facts import CPU, HOST_MEMORY, known_gpu

from .test_plan import AUTO, H200, PICTURE, SMALL


@pytest.mark.parametrize(
    ("config", "ranks", "batch", "words"),
    [
        ({}, 4, 1, ("ulysses 4", "6 of 24 heads each", "one GPU takes", "ms per step", "GiB per GPU")),
        ({}, 4, 2, ("cfg 2 × ulysses 2", "split 2 ways, 1 each", "12 of 24")),
        ({"ulysses": 5}, 8, 1, ("up to 5 of 24 heads each", "3 of 8 devices are not used")),
        ({"ring": 2, "ulysses": 1}, 2, 1, ("keys and values go round",)),
        ({"pipe": 4}, 4, 1, ("4 stages of 14 or 15 blocks", "on the fullest GPU", "(4 patches, 1 warm-up step)")),
        ({}, 1, 1, ("One device computes everything.", "ms per step")),
        ({"data": 1, "cfg": 1, "ulysses": 1}, 2, 1, ("1 of 2 devices is not used.",)),
    ],
)
def test_explain_names_the_degrees_the_reasons_and_the_numbers(config, ranks, batch, words):
    text = explain(Wish(ParallelConfig(**config), ranks, FLUX_DEV, flux_request(1024, batch), H200))
    assert all(word in text for word in words), text


def test_explain_tells_how_many_blocks_send_their_input_where_that_is_sooner(monkeypatch):
    def told(rate: float, model=FLUX_DEV) -> str:
        machine = known_gpu("RTX 4090", 0, replace(HOST_MEMORY, route=rate))
        return explain(Wish(ParallelConfig(ulysses=2), 2, model, PICTURE, machine))

    assert "12 of 24 heads each; 57 of 57 blocks send their input instead" in told(4.0)
    assert "; 19 of 57 blocks send" in told(8.0)  # the feed-forward layer of the others hides heads
    assert "send their input" not in told(20.0)
    assert "send their input" not in told(4.0, replace(FLUX_DEV, projecting_blocks=0))
    assert "send their input" not in told(0.0)
    for switch in ("gather", "blocks"):
        choose.cache_clear()
        monkeypatch.setenv("PARALLEL_DIT_OFF", switch)
        assert "send their input" not in told(4.0)
    choose.cache_clear()


def test_explain_warns_of_a_plan_that_does_not_fit():
    assert "may not fit" in explain(Wish(AUTO, 1, FLUX_DEV, PICTURE, SMALL))


def test_no_times_are_predicted_for_the_cpu():
    assert "Predicted" not in explain(Wish(AUTO, 2, FLUX_DEV, PICTURE, CPU))
