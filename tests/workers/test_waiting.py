"""A request that waits for another one's end can be cancelled meanwhile."""

from __future__ import annotations

import threading

import pytest
import torch

from parallel_runtime.requests.control import Cancelled


@pytest.mark.slow
def test_a_request_that_waits_for_its_turn_hears_a_cancel_and_the_one_before_it_goes_on(faulty_pool):
    pool = faulty_pool()
    running, go_on, result = threading.Event(), threading.Event(), []

    def be_running(*_) -> None:
        running.set()
        go_on.wait(60)

    first = threading.Thread(target=lambda: result.append(pool.sample(on_progress=be_running)), daemon=True)
    first.start()
    assert running.wait(60)
    asked = []
    with pytest.raises(Cancelled):
        pool.sample(should_cancel=lambda: asked.append(None) or len(asked) > 3)
    assert first.is_alive()
    with pytest.raises(Cancelled):
        pool.client.load(pool.model("another"), lambda: True)
    assert first.is_alive()
    go_on.set()
    second = pool.sample()  # its turn comes
    first.join(60)
    assert torch.equal(result[0], second)
