"""One GPU as one of several like it: what a rank takes where messages go through the host's memory.

What this rank sends to another lies where it reads what that one sends, so messages come when another GPU, exactly as
fast and with a link of its own, would have sent them. Other collectives give this rank's part for each, at once. So
times are those of the best case, and results are of no use."""

from __future__ import annotations

import os

import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from parallel_runtime.exchange.host_lanes import Slots


def begin(ranks: int) -> None:
    """Be the first of so many ranks."""
    os.environ |= {"RANK": "0", "WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks), "NCCL_P2P_DISABLE": "1"}
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=ranks)
    word, place = Slots.word, Slots.place
    # One of both is 0, this rank.
    Slots.word = lambda slots, one, other, message: word(slots, 0, one + other, message)  # type: ignore
    Slots.place = lambda slots, one, other, message: place(slots, 0, one + other, message)  # type: ignore
