"""Attention through the host's memory is `ulysses_attention` bit for bit, and no rank waits in a circle."""

from __future__ import annotations

import random
from itertools import accumulate, pairwise
from typing import Any

import pytest
import torch

from parallel_runtime.exchange.grown_memory import _cut
from parallel_runtime.exchange.host_exchange import HostBuffers, attend_through_host
from parallel_runtime.exchange.host_lanes import SLOTS, Slots
from tests.ranks import run_ranks

RUN = "tests.parallel_runtime.host_route_run"
ON_GPU = "tests.parallel_runtime.host_route_on_gpu:on_gpu"


@pytest.mark.parametrize("world_size", [2, 3])
def test_the_bits_are_those_of_ulysses_for_any_lengths_heads_batches_and_chunks(world_size):
    uneven = list(accumulate([4] + [3] * (world_size - 1)))
    cases: list[list[Any]] = []
    for heads in (world_size, 4 * world_size, 4 * world_size + 1, 1):  # the last two do not divide
        cases.append([1, heads, [6] * world_size, 4, 3, None])
        cases.append([2, heads, uneven, 3, 2, 0.2])
        cases.append([2, heads, [1, *uneven[1:]], 1, 4, None])  # pieces without a token
    cases.append([1, 9 * world_size, uneven, 9, 1, None])  # more messages than slots
    cases.append([1, 9 * world_size, [30] * world_size, 9, 30, None])  # inputs in more pieces than slots
    for found in run_ranks(world_size, f"{RUN}:compare", {"cases": cases}):
        assert found["alike"] == [True] * 2 * len(cases)
        assert found["words"] == [0]  # as a recording finds them
        assert found["largest"] < 1e-5
        assert found["beside"] < 1e-5
        assert found["gathered"] < 1e-5


@pytest.mark.parametrize("world_size", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_a_networks_forward_over_the_hosts_memory_has_the_bits_of_one_over_collectives(world_size):
    cases = [[[4, 6], 12, 1], [[5, 7], 12, 2], [[3, 7], 4, 1]]
    for found in run_ranks(world_size, f"{RUN}:forwards", {"cases": cases}):
        assert found["alike"] == [True] * 2 * len(cases)
        assert found["attended"] == 2 * 2 * len(cases)  # two blocks
        assert found["in chunks"]


def test_ranks_share_memory_all_or_none():
    for found in run_ranks(2, f"{RUN}:grow"):
        assert all(found.values()), found


def test_heads_are_cut_evenly_and_small_ones_not():
    assert _cut(10, 4, 2**22) == (3, 3, 2, 2)
    assert _cut(3, 4, 2**22) == (1, 1, 1)
    assert _cut(12, 4, 2**19) == (12,)
    assert _cut(1, 4, 1) == (1,)


@pytest.mark.parametrize("ranks", [2, 3, 5])
def test_no_two_messages_or_words_lie_in_one_place(ranks):
    slots = Slots(ranks, Slots.needed(ranks, 1000))
    pairs = [(one, other) for one in range(ranks) for other in range(ranks)]
    words = {slots.word(*pair, message) for pair in pairs for message in range(SLOTS)}
    assert len(words) == len(pairs) * SLOTS
    places = sorted(slots.place(*pair, message) for pair in pairs if pair[0] != pair[1] for message in range(SLOTS))
    assert len(places) == ranks * (ranks - 1) * SLOTS
    assert slots.room >= 1000
    assert all(other - one >= slots.room for one, other in pairwise(places))
    assert max(words) + 4 <= places[0]
    assert places[-1] + slots.room <= slots.size


class Told:
    """What a rank launches: (what, word, value) of each operation, with the operations that come before it."""

    def __init__(self, ranks: int):
        self.slots = Slots(ranks, Slots.needed(ranks, 1 << 16))
        self.operations: list[tuple[str, int, int]] = []
        self.before: list[set[int]] = []
        self._lanes = tuple(ToldLane(self) for _ in range(3))

    def lanes(self) -> Any:
        return self._lanes

    def any_order(self, rng: random.Random) -> list[tuple[str, int, int]]:
        """The operations in an order that lanes and events allow, and nothing else decides."""
        left, done, order = set(range(len(self.operations))), set(), []
        eager = rng.random() < 0.5  # what was told last comes first wherever it can
        while left:
            can = [index for index in left if self.before[index] <= done]
            index = max(can) if eager else rng.choice(can)
            left.remove(index)
            done.add(index)
            order.append(self.operations[index])
        return order


class ToldLane:
    """Notes what it is told."""

    def __init__(self, told: Told):
        self._told = told
        self._before: set[int] = set()

    def _note(self, what: str, offset: int = 0, value: int = 0) -> int:
        self._told.operations.append((what, offset, value))
        self._told.before.append(self._before)
        self._before = {len(self._told.operations) - 1}
        return len(self._told.operations) - 1

    def after(self, event: int) -> None:
        self._before = self._before | {event}

    def event(self) -> int:
        return self._note("event")

    def wait(self, offset: int, value: int) -> None:
        self._note("wait", offset, value)

    def write(self, offset: int, value: int) -> None:
        self._note("write", offset, value)

    def put(self, offset: int, part: torch.Tensor) -> None:
        assert part.is_contiguous()
        self._note("put")

    def get(self, offset: int, part: torch.Tensor) -> None:
        assert part.is_contiguous()
        self._note("get")


@pytest.mark.slow_but_for("3-2-3")
@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize(("chunks", "pieces"), [(1, 1), (4, 1), (9, 1), (3, 2), (4, 4)])
def test_no_rank_waits_for_ever_whatever_order_a_gpu_chooses_where_no_event_does(ranks, chunks, pieces):
    told = [Told(ranks) for _ in range(ranks)]
    for rank, memory in enumerate(told):
        buffers = HostBuffers(memory, rank, (5,) * ranks, (1,) * chunks, pieces)
        parts = torch.zeros(3, 1, 5, ranks * chunks, 8)
        for _ in range(2):
            attend_through_host(*parts, kernel=lambda query, key, value, mask, scale: value, buffers=buffers)
    for seed in range(60):
        run([memory.any_order(random.Random(seed * ranks + rank)) for rank, memory in enumerate(told)])


def run(orders: list[list[tuple[str, int, int]]]) -> None:
    """Each rank does one operation after the other, and waits where a word is not what it waits for."""
    words: dict[int, int] = {}
    places = [0] * len(orders)
    while any(place < len(order) for place, order in zip(places, orders, strict=True)):
        moved = False
        for rank, order in enumerate(orders):
            while places[rank] < len(order):
                what, offset, value = order[places[rank]]
                if what == "wait" and words.get(offset, 0) != value:
                    break
                if what == "write":
                    words[offset] = value
                places[rank] += 1
                moved = True
        assert moved, f"all ranks wait at {places}"
    assert set(words.values()) == {0}


@pytest.mark.gpu
def test_two_ranks_of_one_gpu_have_the_bits_of_ulysses_launched_and_recorded():
    cases = [[1, 24, [2304, 2304], 0, 0, None], [2, 5, [700, 513], 2, 1, 0.1], [1, 24, [1000, 1000], 7, 4, None]]
    for found in run_ranks(2, ON_GPU, {"cases": cases}, timeout=300, forked=False):
        assert found["through host"]
        assert all(found["launched"]), found
        assert all(found["replayed"]), found
        assert max(found["beside"]) < 0.02, found  # sums of bfloat16 in another order
        assert max(found["gathered"]) < 0.05, found
