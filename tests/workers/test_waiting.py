"""A request that waits for another one's end can be cancelled meanwhile."""

from __future__ import annotations

import threading
import time

import pytest
import torch

from workers.client.client import Cancelled


def test_a_request_that_waits_for_its_turn_hears_a_cancel_and_the_one_before_it_goes_on(faulty_pool):
    pool = faulty_pool()
    running, result = threading.Event(), []
    first = threading.Thread(
        target=lambda: result.append(pool.sample(steps=150, on_progress=lambda *_: running.set())), daemon=True
    )
    first.start()
    assert running.wait(10)
    started = time.monotonic()
    asked = []
    with pytest.raises(Cancelled):
        pool.sample(should_cancel=lambda: asked.append(None) or len(asked) > 3)
    assert first.is_alive()
    with pytest.raises(Cancelled):
        pool.client.load(pool.model("another"), lambda: True)
    assert first.is_alive()
    assert time.monotonic() - started < 2
    second = pool.sample()  # its turn comes
    first.join(10)
    assert torch.equal(result[0], second)
