"""From the first half second on, the node that waits says what for: a start of two CPU ranks."""

from __future__ import annotations

import itertools
import os
import re
import signal

import pytest

from tests.own_time import OwnTime
from tests.patience import wait_until

from .comfy_host import Run
from .test_graph_stays_a_graph import pool_pids
from .workflow import SAMPLER, Workflow

pytestmark = pytest.mark.host

STATES = (
    r"Opening the model file\.",
    r"Starting: \d of \d devices are ready \(\d+ s\)\.",
    r"One picture of 1024 × 1024:",
)
FIRST_TEXT_SECONDS = 0.5
LONGEST_SILENCE = 30.0
"""Seconds. The text counts them one by one; a machine with ten other tests has been seen to let three go by."""


@pytest.mark.slow
def test_a_start_is_told_in_order_from_the_first_half_second_on(host):
    for process in pool_pids(host):
        os.kill(process, signal.SIGKILL)
    assert wait_until(lambda: not pool_pids(host))
    # The death has to be known, so that this prompt starts a pool.
    wait_until(lambda: all(pool["state"] != "idle" for pool in host.get("/parallel_dit/status")["pools"]))
    workflow = Workflow(loader="cpu:2", model="plan.safetensors", weight_dtype="fp16", seed=71)
    began_at: list[OwnTime] = []
    first_text: list[float] = []

    def look(so_far: Run) -> None:
        node, text, _ = so_far.times[-1] if so_far.times else ("", "", 0.0)
        if node in ("loader", "model") and not text and not began_at:
            began_at.append(OwnTime(lambda: (os.getpid(), host.process.pid)))
        elif node in ("loader", "model") and text and began_at and not first_text:
            first_text.append(began_at[0].look())

    run = host.run(workflow.prompt(), during=look)
    assert run.error is None, run.error
    told = [(text, at) for node, text, at in run.times if node in ("loader", "model")]
    first = [text for text, _ in told].index("")  # it began; before that stands what prompts of others said
    shown = told[first + 1 :]
    assert first_text[0] < FIRST_TEXT_SECONDS, (first_text, shown)
    states = [next((index for index, state in enumerate(STATES) if re.match(state, text)), None) for text, _ in shown]
    known = [state for state in states if state is not None]
    assert known == sorted(known), shown
    assert set(known) == {0, 1, 2}, shown
    moments = [at for _, at in shown]
    assert max(after - before for before, after in itertools.pairwise(moments)) < LONGEST_SILENCE, shown
    # What ran stands on KSampler, too.
    assert re.search(
        r" per step\. Latent 14 × 20\. ulysses 2: ", [text for node, text in run.texts if node == SAMPLER][-1]
    )


@pytest.mark.slow
def test_one_rank_and_then_two_tell_the_speed_up(host):
    one = Workflow(loader="cpu:1", model="plan.safetensors", seed=81, steps=4)
    assert host.run(one.prompt()).error is None
    run = host.run(Workflow(loader="cpu:2", model="plan.safetensors", seed=82, steps=4).prompt())
    assert run.error is None, run.error
    on_sampler = [text for node, text in run.texts if node == SAMPLER]
    assert re.search(r"[\d.]+ times as fast as one device, which took", on_sampler[-1]), run.texts
