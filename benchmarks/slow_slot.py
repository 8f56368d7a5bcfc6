"""A slot that is some times as slow as the machine's: each message to and from the host's memory is copied so often."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from parallel_runtime.exchange.host_lanes import StreamLane
from parallel_runtime.requests.facts import MachineFacts


def begin(times: int) -> None:
    """Copy each message so often, in this process."""
    for name in ("put", "get"):
        setattr(StreamLane, name, _repeated(getattr(StreamLane, name), times))


def _repeated(copy: Callable[..., None], times: int) -> Callable[..., None]:
    def run(*given: Any) -> None:
        for _ in range(times):
            copy(*given)

    return run


def told(machine: MachineFacts, times: int) -> MachineFacts:
    """What the ranks would measure, of what they measured by plain copies."""
    return replace(machine, link=replace(machine.link, route=machine.link.route / times))
