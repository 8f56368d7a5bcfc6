"""What a plan is made for: what the artist asks for, of which model, on which ranks, for which request."""

from __future__ import annotations

from dataclasses import dataclass

from ..config import ParallelConfig, ParallelPlan
from ..requests.facts import MachineFacts, ModelFacts, RequestFacts

_PIXELS = 16
"""Of a token's side, in most image models."""


def typical(width: int, height: int) -> RequestFacts:
    """One picture of that size."""
    return RequestFacts(width // _PIXELS * (height // _PIXELS), 512, rows=height // _PIXELS)


TYPICAL = typical(1024, 1024)
"""What a plan is made for when no request is there yet."""


@dataclass(frozen=True)
class Wish:
    """The same on every rank, or the ranks make different plans and wait for ever; `ranks` are those of the pool that
    the configuration may use, `loaded` what `plan_loading` said."""

    config: ParallelConfig
    ranks: int
    model: ModelFacts
    request: RequestFacts
    machine: MachineFacts
    loaded: ParallelPlan | None = None

    @property
    def stage_ranks(self) -> int:
        """Ranks of a stage, where the weights were loaded for so many; else 0."""
        return self.loaded.sequence if self.loaded is not None and self.loaded.pipe > 1 else 0

    @property
    def compiled(self) -> bool:
        """Whether blocks are compiled."""
        return self.config.compiles(self.machine.on_gpu)
