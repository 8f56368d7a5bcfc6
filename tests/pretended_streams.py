"""CUDA's streams without CUDA: of each piece of work, what is certain to be over when it begins."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch


class Stream:
    """Work in its order."""

    def __init__(self, streams: Streams):
        self._streams = streams
        self.over: set[str] = set()

    def wait_stream(self, other: Stream) -> None:
        """What is queued from now on comes after what the other has by now."""
        self.over |= other.over

    def wait_event(self, event: Event) -> None:
        """The same of what the event's stream had when it was recorded."""
        self.over |= event.over

    def synchronize(self) -> None:
        """The host waits."""
        self._streams.host |= self.over


class Event:
    """A place in a stream."""

    def __init__(self, streams: Streams):
        self._streams = streams
        self.over: set[str] = set()

    def record(self, stream: Stream | None = None) -> None:
        """Now, in that stream."""
        self.over = set((stream or self._streams.current()).over)

    def synchronize(self) -> None:
        """The host waits."""
        self._streams.host |= self.over


class Streams:
    """All streams of a device; `torch.cuda` has them while they stand in its place."""

    def __init__(self) -> None:
        self.host: set[str] = set()
        self.before: dict[str, set[str]] = {}
        """Of each work, by its name, in the order in which it was queued."""
        self._first = Stream(self)
        self._of_thread = threading.local()

    def current(self, device: Any = None) -> Stream:
        """The thread's."""
        found: Stream = getattr(self._of_thread, "stream", self._first)
        return found

    def work(self, name: str) -> None:
        """Queue work in the current stream."""
        stream = self.current()
        self.before[name] = stream.over | self.host
        stream.over |= {*self.before[name], name}

    @contextmanager
    def inside(self, stream: Stream) -> Iterator[None]:
        """`torch.cuda.stream`."""
        outside, self._of_thread.stream = self.current(), stream
        yield
        self._of_thread.stream = outside

    def stand_in(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Take the place of CUDA's."""

        @contextmanager
        def on(device: Any) -> Iterator[None]:
            yield

        monkeypatch.setattr(torch.cuda, "Stream", lambda device=None: Stream(self))
        monkeypatch.setattr(torch.cuda, "Event", lambda: Event(self))
        monkeypatch.setattr(torch.cuda, "current_stream", self.current)
        monkeypatch.setattr(torch.cuda, "stream", self.inside)
        monkeypatch.setattr(torch.cuda, "device", on)
