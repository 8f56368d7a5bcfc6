"""What ended a pool. One failure shows in many places at once; the verdict names the likeliest cause."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field

from ..wire.error_info import ErrorInfo

BLAME_SECONDS = 0.3
"""So long after the first sign the others are waited for."""


class Blame(enum.IntEnum):
    """Signs of a failure, likeliest cause first."""

    HOST_LOST = 0
    TORCHRUN_KILLED = 1
    RANK_FAILED = 2
    RANK_ENDED = 3
    PROCESS_ENDED = 4
    COLLECTIVE_BROKE = 5


@dataclass
class Verdict:
    """The signs so far, in the order in which they were noticed."""

    _signs: list[tuple[Blame, ErrorInfo]] = field(default_factory=list)

    def note(self, blame: Blame, error: ErrorInfo) -> bool:
        """Take in a sign; return whether it is the first."""
        self._signs.append((blame, error))
        return len(self._signs) == 1

    @property
    def of_rank(self) -> bool:
        """A rank has failed by itself, or ended: another that ends from now on does so in consequence."""
        return any(blame in (Blame.HOST_LOST, Blame.RANK_FAILED, Blame.RANK_ENDED) for blame, _ in self._signs)

    @property
    def cause(self) -> ErrorInfo:
        """The likeliest cause, of several alike the one that was noticed first."""
        return min(self._signs, key=lambda sign: sign[0])[1]
