"""Messages between GPUs through memory of the host that all ranks have mapped, without NCCL and without the CPU.

A message lies in one of a few slots that each rank has for each other one, with a word that says whether it is full.
The sender's stream waits until the word is 0, copies, and writes 1 (or 2, of another kind of message); the receiver's
waits for that, copies, and writes 0.
So the words are as before when both have done it: a recording can be replayed, and another rank may launch plainly.

No rank waits in a circle, in whatever order a GPU runs what no event puts in order: message m is sent after message
m - SLOTS was received and received after it was sent, on each rank by itself too. So what anybody waits for is a
message with a smaller number."""

from __future__ import annotations

import ctypes
import functools
import weakref
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from ..acceleration.cuda_graphs import captured
from ..gpu_memory import cuda_driver
from ..gpu_memory.arena import ALIGNMENT, aligned
from ..gpu_memory.cuda_driver import DriverError
from ..streaming.share_memory import HostShare

LEAST_MESSAGE = 4 << 20
"""Bytes, at least: more messages launch too slowly where nothing is replayed (FLUX.1, 1024², two H100s: 4.5 ms an
attention with pieces of 1.3 MB, 2.1 with 5.3; replayed 1.11 and 1.05)."""
SLOTS = 8  # messages from one rank to another that may be under way
_APART = 64  # bytes from word to word: a line of a CPU's cache
_EMPTY = 0
HEADS, INPUTS = 1, 2
"""What a word is where a slot is full, by what the attention's first messages are. A rank that waits for another kind
than was sent waits until its pool ends, and does not compute with it."""
_EQUAL = 1  # CU_STREAM_WAIT_VALUE_EQ


@dataclass(frozen=True)
class Slots:
    """Where words and messages lie in memory of so many bytes; nothing else decides, so that every use of it agrees."""

    ranks: int
    size: int

    @staticmethod
    def needed(ranks: int, message: int) -> int:
        """Bytes of memory for messages of so many bytes."""
        return _header(ranks) + ranks * (ranks - 1) * SLOTS * aligned(message)

    @property
    def room(self) -> int:
        """Bytes of the longest message."""
        each = (self.size - _header(self.ranks)) // (self.ranks * (self.ranks - 1) * SLOTS)
        return each // ALIGNMENT * ALIGNMENT

    def word(self, source: int, target: int, message: int) -> int:
        """The byte at which a message's word is."""
        return ((source * self.ranks + target) * SLOTS + message % SLOTS) * _APART

    def place(self, source: int, target: int, message: int) -> int:
        """The byte at which a message is."""
        pair = source * (self.ranks - 1) + (target - source - 1) % self.ranks
        return _header(self.ranks) + (pair * SLOTS + message % SLOTS) * self.room


def _header(ranks: int) -> int:
    return aligned(ranks * ranks * SLOTS * _APART)


class Exchange:
    """The messages of one attention, numbered from 0 on; every rank sends and receives each, to and from all others."""

    def __init__(self, memory: StreamMemory, rank: int, kind: int):
        self._slots = memory.slots
        self._rank, self._full = rank, kind
        self._here, self._out, self._in = memory.lanes()
        self._sent: dict[int, Any] = {}
        self._received: dict[int, Any] = {}

    @property
    def others(self) -> list[int]:
        """The other ranks; not everyone begins with the same."""
        return [(self._rank + step) % self._slots.ranks for step in range(1, self._slots.ranks)]

    def mark(self) -> Any:
        """What the caller computes up to here; for `send`."""
        return self._here.event()

    def send(self, message: int, parts: Mapping[int, torch.Tensor], ready: Any) -> None:
        """Send to each other rank its part, contiguous; it stays as it is until the last `take`."""
        out = self._out
        out.after(ready)
        if message >= SLOTS:
            out.after(self._received[message - SLOTS])
        for to in self.others:
            word = self._slots.word(self._rank, to, message)
            out.wait(word, _EMPTY)
            if parts[to].numel():
                out.put(self._slots.place(self._rank, to, message), parts[to])
            out.write(word, self._full)
        self._sent[message] = out.event()

    def receive(self, message: int, parts: Mapping[int, torch.Tensor]) -> None:
        """Receive from each other rank its part, into memory that was free when this message was marked ready."""
        self._in.after(self._sent[message])
        for source in reversed(self.others):
            word = self._slots.word(source, self._rank, message)
            self._in.wait(word, self._full)
            if parts[source].numel():
                self._in.get(self._slots.place(source, self._rank, message), parts[source])
            self._in.write(word, _EMPTY)
        self._received[message] = self._in.event()

    def take(self, message: int) -> None:
        """What the caller computes from here on reads what was received. After the last one all lanes are through."""
        self._here.after(self._received[message])


class StreamMemory:
    """The memory of the host that every rank has mapped, as streams of this rank's GPU reach it. DriverError: it cannot
    be pinned, or streams do not wait for words in it, or not in a CUDA graph."""

    def __init__(self, share: HostShare, rank: int, ranks: int, device: torch.device):
        share.pin()
        if not share.pinned:
            raise DriverError("memory of the host cannot be pinned")
        self.device = device
        self.slots = Slots(ranks, share.memory.numel())
        address = ctypes.c_uint64()
        cuda_driver.call("cuMemHostGetDevicePointer_v2", ctypes.byref(address), share.memory.data_ptr(), 0)
        self._base = address.value
        self._streams = _streams(device)
        self._try(StreamLane(self._streams[0], self._base), self.slots.word(rank, rank, 0))
        weakref.finalize(self, _close, share, device).atexit = False

    def lanes(self) -> tuple[StreamLane, StreamLane, StreamLane]:
        """The current stream, and the two of this GPU for what goes out and what comes in."""
        here, (out, back) = torch.cuda.current_stream(self.device), self._streams
        return StreamLane(here, self._base), StreamLane(out, self._base), StreamLane(back, self._base)

    def _try(self, lane: StreamLane, word: int) -> None:
        """Write and wait for a word that no other rank uses, launched and recorded."""

        def once() -> None:
            for value in (HEADS, _EMPTY):
                lane.write(word, value)
                lane.wait(word, value)

        with torch.cuda.stream(lane.stream):
            once()
            lane.stream.synchronize()
            with captured(torch.cuda.graph_pool_handle()) as graph:
                once()
            graph.replay()
            lane.stream.synchronize()


@functools.cache
def _streams(device: torch.device) -> tuple[torch.cuda.Stream, torch.cuda.Stream]:
    """Of a GPU, for all that goes out and all that comes in: torch has few streams to give, which repeat."""
    return torch.cuda.Stream(device), torch.cuda.Stream(device)


def _close(share: HostShare, device: torch.device) -> None:
    """Nobody holds it any more; what was launched may still copy."""
    torch.cuda.synchronize(device)
    share.close()


@dataclass(frozen=True)
class StreamLane:
    """A stream of a GPU, which does in order what it is told; offsets are bytes of the shared memory at `base`."""

    stream: torch.cuda.Stream
    base: int

    def after(self, event: torch.cuda.Event) -> None:
        """The stream waits for an event."""
        self.stream.wait_event(event)

    def event(self) -> torch.cuda.Event:
        """An event behind what was launched."""
        return self.stream.record_event()

    def wait(self, offset: int, value: int) -> None:
        """The stream waits for a word's value."""
        cuda_driver.call("cuStreamWaitValue32_v2", self.stream.cuda_stream, self.base + offset, value, _EQUAL)

    def write(self, offset: int, value: int) -> None:
        """The stream writes a word."""
        cuda_driver.call("cuStreamWriteValue32_v2", self.stream.cuda_stream, self.base + offset, value, 0)

    def put(self, offset: int, part: torch.Tensor) -> None:
        """The stream copies to the shared memory."""
        cuda_driver.call("cuMemcpyAsync", self.base + offset, part.data_ptr(), part.nbytes, self.stream.cuda_stream)

    def get(self, offset: int, part: torch.Tensor) -> None:
        """The stream copies from there."""
        cuda_driver.call("cuMemcpyAsync", part.data_ptr(), self.base + offset, part.nbytes, self.stream.cuda_stream)
