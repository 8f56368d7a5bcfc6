"""Who reads a model's file; moves weights from files into a region of a device, and between it and the host.

One thread reads 2 to 3 GB/s out of the system's file cache, and a copy from memory that is not pinned waits for the
host. Several threads that read into pinned memory, with two buffers each, keep the link to the GPU busy.
"""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import os
import threading
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ..errors import CheckpointError, NotLoadedError
from ..gpu_memory.cuda_driver import pinned
from ..networks.tables.blocks import Blocks
from .files import Identity, identity, reading

THREADS = 8
BUFFER = 16 << 20  # bytes of one of a thread's two buffers
_COPY = 64 << 20  # bytes of a copy between a device and the host
_POLL_SECONDS = 0.1

OnBytes = Callable[[int, int], None]  # (bytes that were read, bytes in all), ten times a second; may raise to give up
Buffers = Iterator[tuple[torch.Tensor, torch.cuda.Event | None]]
"""Memory to read into, in turn, each with the event of the copy that last read from it."""


@dataclass(frozen=True)
class Place:
    """Numbers of a file that lie one after the other, from which byte on, and their type there."""

    file: Path
    start: int
    stored: torch.dtype


@dataclass(frozen=True)
class Piece(Place):
    """Numbers of a file that are read at once, and where they go, (numbers,) of the same or any floating-point type."""

    target: torch.Tensor

    @property
    def size(self) -> int:
        """Bytes in the file."""
        return self.target.numel() * self.stored.itemsize


def ignore(done: int, total: int) -> None:
    """For who does not want to know how far it is."""


Find = Callable[[str, int], Place | torch.Tensor]
"""(a weight's name, which of its parts (weight_parts.py)) -> where the file has it as it is, else its numbers, on the
host. Holds whatever that needs."""
Owned = tuple[int, int] | None  # (start, stop) of the blocks that this rank has, of a network in stages; None for all


class Reader(ABC):
    """Who reads a model's file, recognised when it had this stamp; `lists` are its blocks as they run, if known."""

    def __init__(self, path: str | Path, stamp: Identity, lists: Sequence[Blocks] = (), owned: Owned = None):
        self.owned = owned
        self._path = path
        self._stamp = stamp
        self.lists = lists

    def open(self, on_bytes: OnBytes) -> tuple[nn.Module, Find]:
        """The network of the file, whose weights have no numbers yet, and where they are, to be read later.
        NotLoadedError: the file was replaced since. CheckpointError, UnsupportedModelError: it cannot be read."""
        if identity(self._path) != self._stamp:
            raise NotLoadedError("{path} was replaced since it was loaded.", "Queue the prompt again.", path=self._path)
        return self.begin(on_bytes)

    @abstractmethod
    def begin(self, on_bytes: OnBytes) -> tuple[nn.Module, Find]:
        """Build the network of the file, which is what it was when it was recognised."""

    def blocks(self, network: nn.Module) -> list[str]:
        """Paths of all blocks, in forward order."""
        paths = [blocks.path for blocks in self.lists]
        return [f"{path}.{name}" for path in paths for name, _ in network.get_submodule(path).named_children()]


def split(found: Place | torch.Tensor, target: torch.Tensor) -> list[Piece]:
    """Numbers of a file and where they go, as pieces; of such on the host none, as they are copied now."""
    if isinstance(found, torch.Tensor):
        target.copy_(found)
        return []
    flat, width, most = target.view(-1), found.stored.itemsize, BUFFER // found.stored.itemsize
    starts = range(0, flat.numel(), most)
    return [Piece(found.file, found.start + at * width, found.stored, flat[at : at + most]) for at in starts]


def read(pieces: Sequence[Piece], on_bytes: OnBytes) -> None:
    """Fill the targets of all pieces, device by device; returns when they are filled. CheckpointError: a file cannot be
    read, or has become shorter. torch.OutOfMemoryError: no memory to convert types on the device. When it raises, also
    what `on_bytes` raises, no thread writes any more."""
    with contextlib.ExitStack() as stack:
        files: dict[Path, int] = {}
        for file in {piece.file for piece in pieces}:
            with reading(file):
                files[file] = stack.enter_context(file.open("rb")).fileno()
        for device in sorted({piece.target.device for piece in pieces}, key=str):
            if device.type == "cuda":
                # Threads copy on streams of their own: what the caller's still does in memory that is the targets' now.
                torch.cuda.current_stream(device).synchronize()
            own = [piece for piece in pieces if piece.target.device == device]
            _in_threads(own, partial(_fill, files), device, sum(piece.size for piece in own), on_bytes)


def read_through(path: Path, on_bytes: OnBytes) -> None:
    """Read all of a file into the system's cache; see `read`."""
    with reading(path):
        size = path.stat().st_size
    scratch = torch.empty(BUFFER, dtype=torch.uint8)  # all threads write over it, and nobody reads it
    pieces = [Piece(path, start, torch.uint8, scratch[: size - start]) for start in range(0, size or 1, BUFFER)]
    read(pieces, on_bytes)


def to_device(region: torch.Tensor, host: torch.Tensor, on_bytes: OnBytes) -> None:
    """Fill a region from the host, both (bytes,) uint8, and wait; at the link's speed where that memory is pinned."""
    for start in range(0, region.numel(), _COPY):
        region[start : start + _COPY].copy_(host[start : start + _COPY], non_blocking=True)
        on_bytes(start, region.numel())
    if region.is_cuda:
        torch.cuda.synchronize(region.device)


def to_host(host: torch.Tensor, region: torch.Tensor, on_bytes: OnBytes) -> None:
    """Save a region in the host's memory, which may be new: several threads make its pages, each out of pinned buffers,
    as the driver copies to other memory for one thread at a time (24 GB in 20 s)."""

    def save(start: int, buffers: Buffers) -> int:
        part = region[start : start + BUFFER]
        if region.is_cuda:
            buffer, _ = next(buffers)
            part = buffer[: part.numel()].copy_(part)
        host[start : start + part.numel()].copy_(part)
        return part.numel()

    if region.is_cuda:
        torch.cuda.synchronize(region.device)  # threads copy on streams of their own
    _in_threads(range(0, region.numel(), BUFFER), save, region.device, region.numel(), on_bytes)


def _in_threads(
    items: Sequence[Any], work: Callable[[Any, Buffers], int], device: torch.device, total: int, on_bytes: OnBytes
) -> None:
    """Work in threads, item by item in their order; `work`: (item, the thread's buffers) -> bytes that are through."""
    waiting, counted, stop = deque(items), list[int](), threading.Event()

    def run() -> None:
        with torch.no_grad(), _buffers(device) as buffers:
            while not stop.is_set():
                try:
                    item = waiting.popleft()
                except IndexError:
                    return
                counted.append(work(item, buffers))

    with ThreadPoolExecutor(THREADS, thread_name_prefix="weights") as threads, contextlib.ExitStack() as stack:
        stack.callback(stop.set)  # before the executor's end, which waits for its threads
        running = {threads.submit(run) for _ in range(THREADS)}
        while running:
            done, running = wait(running, timeout=_POLL_SECONDS, return_when="FIRST_EXCEPTION")
            for future in done:
                future.result()
            on_bytes(sum(counted), total)


def _fill(files: Mapping[Path, int], piece: Piece, buffers: Buffers) -> int:
    target = piece.target
    if target.device.type == "cpu" and piece.stored == target.dtype:
        # Memory of the host, such as a share, is read into at once: a copy takes as long as the read.
        _read_exactly(files[piece.file], piece, target)
        return piece.size
    buffer, copied = next(buffers)
    if copied is not None:
        copied.synchronize()  # the copies out of it are through
    _read_exactly(files[piece.file], piece, buffer[: piece.size])
    staged = buffer[: piece.size].view(piece.stored)
    if piece.stored != target.dtype:
        staged = staged.to(target.device, non_blocking=True)  # half of the bytes would be converted on the host
    target.copy_(staged, non_blocking=True)
    if copied is not None:
        copied.record()
    return piece.size


def _read_exactly(descriptor: int, piece: Piece, buffer: torch.Tensor) -> None:
    # By address: a tensor that was handed to NumPy cannot give its memory back for ever after.
    view, done = memoryview((ctypes.c_ubyte * piece.size).from_address(buffer.data_ptr())), 0
    while done < piece.size:
        with reading(piece.file):
            count = os.preadv(descriptor, [view[done:]], piece.start + done)
        if not count:
            raise CheckpointError("{file} became shorter while it was read.", "Copy the file again.", file=piece.file)
        done += count


@contextlib.contextmanager
def _buffers(device: torch.device) -> Iterator[Buffers]:
    """A thread's two buffers in turn: one is read into while the other is copied. They are pinned, with a stream of its
    own and an event behind the copies out of each, where the device is a GPU."""
    buffers = [torch.empty(BUFFER, dtype=torch.uint8) for _ in range(2)]
    if device.type != "cuda":
        yield itertools.repeat((buffers[0], None))
        return
    with torch.cuda.device(device), contextlib.ExitStack() as stack:
        for buffer in buffers:
            stack.enter_context(pinned(buffer))
        stream = torch.cuda.Stream(device)
        stack.callback(stream.synchronize)
        stack.enter_context(torch.cuda.stream(stream))
        yield itertools.cycle([(buffer, torch.cuda.Event()) for buffer in buffers])
