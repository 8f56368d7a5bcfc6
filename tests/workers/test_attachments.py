"""Networks beside the model: the ranks have those that somebody here has, and no others."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Mapping
from typing import Any

import torch

from parallel_runtime.engine.engine import Engine
from parallel_runtime.engine.rank_state import Prepared
from parallel_runtime.requests.conditioning import OPTIONS, refer
from parallel_runtime.requests.patches import CARRIED, PATCHES, Attached, Patch
from parallel_runtime.requests.requests import Finished
from tests.parallel_runtime.staged_run import Quiet
from workers.client.held import Attachments
from workers.client.node_requests import Submission


class Pool:
    """One rank, which is asked what a client asks."""

    def __init__(self) -> None:
        self.engine = Engine(torch.device("cpu"), 0, 1)
        self.asked: list[Any] = []

    def submit(self, submission: Submission) -> Any:
        self.asked.append(submission.request)
        self.run(submission.request, submission.tensors)

    def run(self, request: Any, tensors: Mapping[str, torch.Tensor]) -> None:
        meta = {name: tensor.to("meta") for name, tensor in tensors.items()}
        self.engine.prepare(request, meta, Quiet()).run(dict(tensors), Quiet())

    def call(self, number: int, network: Attached) -> None:
        """Keep a conditioning that names the network, and a call with it, as a `Forward` does."""
        options = {CARRIED: {PATCHES: {"double_block": [Patch("some:code", 1, values={"network": network})]}}}
        reference, given = refer(number, {"context": torch.ones(1, 1, 4), OPTIONS: options})
        (conditioning,) = self.engine.conditionings.take([reference], given, kept=range(number))
        self.engine.calls[number] = Prepared(
            run_it=lambda tensors, control, agreed: (Finished(), {}), names=conditioning.names
        )

    def network(self, number: int) -> weakref.ref[torch.nn.Module]:
        return weakref.ref(self.engine.conditionings.attached[number])


def test_a_network_that_nobody_has_any_more_leaves_the_ranks_with_the_next_call():
    pool = Pool()
    attachments = Attachments(pool.submit)
    networks = [Attached(number, torch.nn.Linear(4, 4)) for number in (1, 2)]
    for each in networks:
        attachments.bring([each])
        pool.call(each.number, each)
    there = [pool.network(number) for number in (1, 2)]
    attachments.bring(networks)
    assert len(pool.asked) == 4
    del networks[0], each
    gc.collect()
    attachments.bring([])  # a call without any
    gc.collect()
    assert pool.asked[-1].kept == (2,)
    assert [found() is None for found in there] == [True, False]
    assert list(pool.engine.calls) == [2]
    attachments.bring(networks)
    assert len(pool.asked) == 5


def test_what_may_not_be_there_any_more_is_sent_again_and_let_go_when_nobody_has_it():
    pool = Pool()
    attachments = Attachments(pool.submit)
    network = Attached(1, torch.nn.Linear(4, 4))
    attachments.bring([network])
    attachments.forget()
    attachments.bring([network])
    assert [(each.number, each.kept) for each in pool.asked] == [(1, None)] * 2 + [(0, ())] + [(1, None)] * 2
    there = pool.network(1)
    attachments.forget()
    del network
    gc.collect()
    attachments.bring([])
    gc.collect()
    assert there() is None
