"""One job's way through the two phases, as a state machine without any input or output."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from ..wire.frames import Frame
from ..wire.protocol import Done, Failed, Ready


@dataclass
class ActiveJob:
    """The job that the pool is busy with, and what each rank answered.

    Args:
        prompt: the answer goes out when rank 0 has it; the next job begins when all ranks are through.

    `preparing` ends when every rank said `Ready` or `Failed`; `running` when every rank said `Done`, or one `Failed`.
    """

    number: int
    world_size: int
    phase: Literal["preparing", "running"] = "preparing"
    ready: dict[int, Ready] = field(default_factory=dict)
    failed: dict[int, Failed] = field(default_factory=dict)
    done: set[int] = field(default_factory=set)
    result: Frame | None = None
    cancelled: bool = False
    prompt: bool = False
    answered: bool = False

    def answer(self, frame: Frame) -> None:
        """Take in a rank's answer; one for another job, or for another phase, is a late one and is dropped."""
        message = frame.message
        if not isinstance(message, (Ready, Done, Failed)) or message.number != self.number:
            return
        if isinstance(message, Failed):
            self.failed[message.rank] = message
        elif isinstance(message, Ready) and self.phase == "preparing":
            self.ready[message.rank] = message
        elif isinstance(message, Done) and self.phase == "running":
            self.done.add(message.rank)
            if message.rank == 0:
                self.result = frame

    @property
    def prepared(self) -> bool:
        """Every rank has answered the first phase."""
        return len(self.ready) + len(self.failed) == self.world_size

    @property
    def agreed(self) -> dict[str, int]:
        """The least of what the ranks offered under each name."""
        least: dict[str, int] = {}
        for ready in self.ready.values():
            for name, offer in ready.offers.items():
                least[name] = min(offer, least.get(name, offer))
        return least

    @property
    def unbegun(self) -> bool:
        """Every rank has refused a call that was not prepared: none waits for another."""
        return len(self.failed) == self.world_size and all(failed.unbegun for failed in self.failed.values())

    @property
    def broken(self) -> bool:
        """A rank failed while others run: nobody knows what those are waiting for."""
        return self.phase == "running" and (
            any(not failed.unbegun for failed in self.failed.values()) or bool(self.failed and self.done)
        )

    @property
    def answerable(self) -> bool:
        """The client can have its answer now, and has not had it."""
        return self.result is not None and not self.answered and (self.prompt or self.finished)

    @property
    def finished(self) -> bool:
        """Every rank has run the job."""
        return self.phase == "running" and len(self.done) == self.world_size

    @property
    def failure(self) -> Failed:
        """The failure to tell: a real one before a cancelled one, the lowest rank's first."""
        return min(self.failed.values(), key=lambda failed: (failed.cancelled, failed.rank))
