"""What streams of a GPU wait for, on streams that are none: blocks that come while others run, and weights that are
read into memory that the caller's stream had."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
import torch

from parallel_runtime.gpu_memory import cuda_driver
from parallel_runtime.loading import reading
from parallel_runtime.planning.coming_blocks import SLOTS
from parallel_runtime.streaming.block_stream import BlockStream
from parallel_runtime.streaming.dealer import Dealer
from tests.pretended_streams import Streams

GPU = torch.device("cuda")
BLOCKS = 5


@pytest.fixture
def streams(monkeypatch) -> Streams:
    streams = Streams()
    streams.stand_in(monkeypatch)
    return streams


class _Shared:
    """Blocks elsewhere."""

    device, sizes = GPU, (8,) * BLOCKS

    def __init__(self, streams: Streams, held: int):
        self._streams = streams
        self.dealer = Dealer("host", 0, 1, None, "key", GPU, held=held)
        self.state = 1
        self.brought: list[int] = []

    def meet(self) -> bool:
        return False

    @contextmanager
    def reading(self) -> Iterator[None]:
        yield

    def fetch(self, block: int, target: torch.Tensor) -> None:
        self._streams.work(f"bring {block}")
        self.brought.append(block)


def stream_of(streams: Streams, held: int = 0) -> BlockStream:
    shared: Any = _Shared(streams, held)
    return BlockStream(shared, [torch.empty(8, dtype=torch.uint8) for _ in range(BLOCKS)])


def run(stream: BlockStream, streams: Streams, block: int) -> None:
    stream._run(block, streams.work, f"run {block}")


def test_a_block_runs_when_it_is_there_and_comes_when_its_slot_is_free(streams):
    stream = stream_of(streams)
    streams.work("forward before")
    with stream.forward():
        for block in range(BLOCKS):
            run(stream, streams, block)
    streams.work("forward after")
    before = streams.before
    assert [name for name in before if name.startswith("bring")] == [f"bring {block}" for block in range(BLOCKS)]
    for block in range(BLOCKS):
        assert f"bring {block}" in before[f"run {block}"]
        last = f"run {block - SLOTS}" if block >= SLOTS else "forward before"
        assert last in before[f"bring {block}"]
        # And no later: it comes while the block before it runs.
        assert f"run {block - 1}" not in before[f"bring {block}"]
    assert {f"bring {block}" for block in range(BLOCKS)} <= before["forward after"]


def test_what_is_on_its_way_when_a_forward_ends_early_is_waited_for(streams):
    stream = stream_of(streams)
    with suppress(ValueError), stream.forward():
        run(stream, streams, 0)
        raise ValueError("what the next block raises")
    streams.work("whatever has the slots' memory next")
    assert {"bring 0", "bring 1", "bring 2"} <= streams.before["whatever has the slots' memory next"]


def test_blocks_in_another_order_are_there_all_the_same(streams):
    stream = stream_of(streams)
    with stream.forward():
        for block in (3, 1, 0):
            run(stream, streams, block)
            assert f"bring {block}" in streams.before[f"run {block}"]


@pytest.mark.parametrize("held", [2, 4, BLOCKS])
def test_blocks_with_places_of_their_own_come_when_weights_have_changed_and_others_in_each_forward(held, streams):
    stream = stream_of(streams, held)
    shared: Any = stream._shared
    own = [block for block, slot in enumerate(shared.dealer.turns(BLOCKS)) if slot is None]
    streamed = [block for block in range(BLOCKS) if block not in own]
    assert len(own) == held
    # Of the same name once more, when their memory has gone and come again.
    for state, gone, comes in ((1, False, own), (1, False, []), (2, False, own), (2, True, own)):
        shared.state, shared.brought = state, []
        if gone:
            stream.forget()
        stream.meet()
        assert shared.brought == comes
        streams.before.clear()
        with stream.forward():
            for block in range(BLOCKS):
                run(stream, streams, block)
        assert sorted(shared.brought[len(comes) :]) == streamed
        assert all(f"bring {block}" in streams.before[f"run {block}"] for block in streamed)


class _Target:
    """Memory of the GPU."""

    device, dtype = GPU, torch.uint8

    def __init__(self, streams: Streams, name: str, size: int):
        self._streams, self._name, self._size = streams, name, size

    def numel(self) -> int:
        return self._size

    def copy_(self, staged: torch.Tensor, non_blocking: bool) -> None:
        self._streams.work(self._name)


def test_weights_are_read_into_memory_that_nobody_uses_any_more_and_are_there_at_the_end(
    streams, tmp_path, monkeypatch
):
    monkeypatch.setattr(cuda_driver, "register", lambda memory: False)
    file = Path(tmp_path / "weights")
    file.write_bytes(bytes(64))
    streams.work("what had the memory")
    targets: list[Any] = [_Target(streams, f"copy {number}", 8) for number in range(8)]
    pieces = [reading.Piece(file, 8 * number, torch.uint8, target) for number, target in enumerate(targets)]
    reading.read(pieces, lambda done, total: None)
    copies = {f"copy {number}" for number in range(8)}
    assert all("what had the memory" in streams.before[copy] for copy in copies)
    assert copies <= streams.host
