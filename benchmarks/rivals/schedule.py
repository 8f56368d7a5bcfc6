"""Which measurement runs when, and on which GPUs: side by side where they need fewer than there are."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from .case import Case
from .estimate import seconds_for

Outcome = tuple[dict[str, object], torch.Tensor | None]
"""What a case's row says, and its latent where there is one."""
POLL = 0.05
AHEAD = 8.0
"""Seconds that a case spends on imports, estimated."""


@dataclass(frozen=True)
class Turn:
    """A case's turn.

    Args:
        place: of its row in the table.
        width: GPUs that nobody else uses meanwhile: its own, or all.
        seconds: estimated.
    """

    place: int
    case: Case
    width: int
    seconds: float


class Run(Protocol):
    """A case's processes; see launch.py."""

    def go(self, limit: float) -> None:
        """The GPUs are free."""
        ...

    def poll(self) -> Outcome | None:
        """What came of it, once it has ended."""
        ...

    def end(self) -> None:
        """Take down what there is of it."""
        ...


class Gpus:
    """Those that nobody uses."""

    def __init__(self, count: int) -> None:
        self.count = count
        self._free = list(range(count))

    def take(self, width: int) -> tuple[int, ...] | None:
        """So many of them, or None while there are fewer."""
        if len(self._free) < width:
            return None
        taken, self._free = tuple(self._free[:width]), self._free[width:]
        return taken

    def give(self, taken: Iterable[int]) -> None:
        """They are free again."""
        self._free = sorted([*self._free, *taken])


def order_turns(cases: Sequence[Case], gpus: int, alone: bool = False) -> list[Turn]:
    """The order in which cases begin: references first, then by GPUs, so that like cases fill the machine.

    Args:
        alone: nothing beside anything. What exchanges through the host's memory never has a neighbour.
    """

    def turn_of(place: int, case: Case) -> Turn:
        width = max(gpus, case.ranks) if alone or case.uses_host else case.ranks
        return Turn(place, case, width, seconds_for(case))

    def key(turn: Turn) -> tuple[float, ...]:
        # The longest first, so that what runs beside it ends with it.
        length = -turn.seconds if turn.width < gpus else 0.0
        return turn.case.extra, turn.width, not turn.case.is_reference, length, turn.place

    return sorted((turn_of(place, case) for place, case in enumerate(cases)), key=key)


@dataclass
class Queue:
    """Runs all turns, each as soon as its GPUs are free. None overtakes, so none waits for ever.

    Args:
        turns: in the order in which they begin.
        begin: starts a case's processes, which import what they need until they are told to go.
        grant: seconds that a case may take now; none are left at 0.
        tell: gets what came of each.
        ahead: whether a case that needs every GPU starts its processes while others still run.
    """

    turns: Sequence[Turn]
    gpus: Gpus
    begin: Callable[[Case, tuple[int, ...]], Run]
    grant: Callable[[Case], float]
    tell: Callable[[Turn, Outcome], None]
    ahead: bool = True

    def run(self) -> None:
        """Until all have ended; takes down what runs if it is broken off."""
        self._waiting = deque(self.turns)
        self._running: list[tuple[Turn, Run, tuple[int, ...]]] = []
        self._prepared: Run | None = None  # of the turn that waits first
        try:
            while self._waiting or self._running:
                while self._waiting and self._begin_first():
                    self._waiting.popleft()
                self._running = [entry for entry in self._running if not self._ended(*entry)]
                if self._running:
                    time.sleep(POLL)
        finally:
            for _, run, _ in self._running:
                run.end()
            self._drop_prepared()

    def _begin_first(self) -> bool:
        """Whether the first that waits has begun, or never will."""
        turn = self._waiting[0]
        limit, refusal = self.grant(turn.case), ""
        if turn.width > self.gpus.count:
            refusal = f"this machine has {self.gpus.count} GPUs"
        elif limit <= 0:
            refusal = "left out, as the seconds for all were over"
        if refusal:
            self._drop_prepared()
            self.tell(turn, ({"reason": refusal}, None))
            return True
        taken = self.gpus.take(turn.width)
        if taken is None:
            if self.ahead and self._prepared is None and _begins_ahead(turn, self.gpus.count):
                self._prepared = self.begin(turn.case, tuple(range(self.gpus.count)))
            return False
        run = self._prepared or self.begin(turn.case, taken[: turn.case.ranks])
        self._prepared = None
        self._running.append((turn, run, taken))
        run.go(limit)
        return True

    def _ended(self, turn: Turn, run: Run, taken: tuple[int, ...]) -> bool:
        outcome = run.poll()
        if outcome is None:
            return False
        run.end()
        self.gpus.give(taken)
        self.tell(turn, outcome)
        return True

    def _drop_prepared(self) -> None:
        if self._prepared is not None:
            self._prepared.end()
        self._prepared = None


def _begins_ahead(turn: Turn, gpus: int) -> bool:
    # Its GPUs are known, and it disturbs nobody: before what exchanges through the host's memory runs only its like.
    return turn.case.ranks == gpus and not turn.case.uses_host


def estimate(turns: Sequence[Turn], gpus: int, ahead: bool = True) -> list[float]:
    """When each turn ends, in seconds from the start of all, if every case takes what is estimated."""
    free, begun, ends = [0.0] * gpus, 0.0, []
    for turn in turns:
        width = min(turn.width, gpus)
        begun = max(begun, sorted(free)[width - 1])
        early = AHEAD if ahead and _begins_ahead(turn, gpus) and begun > 0 else 0.0
        end = begun + turn.seconds - early
        for gpu in sorted(range(gpus), key=lambda gpu: free[gpu])[:width]:
            free[gpu] = end
        ends.append(end)
    return ends
