"""Another way of a network's forwards: inputs of a block's layers go through the host's memory instead of heads."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager

from ..mesh.agreement import NONE
from ..replaced import replaced
from .sequence_attention import AttendedTokens


class GatheredInputs:
    """What recordings ask of a network (`OtherWay`). `refused` names blocks that run as they are on this rank: these
    have no such layers, and send heads."""

    def __init__(self, tokens: AttendedTokens, refused: Callable[[], Iterable[str]]):
        self._tokens, self._refused = tokens, refused

    def seen(self) -> int:
        """By what each attention of the last forward could have sent."""
        noted = self._tokens.noted
        return _number(noted) if any(noted) else NONE

    def taken(self) -> AbstractContextManager[None]:
        """Inputs go where they can."""
        return replaced(self._tokens, "gathers", True)

    def state(self) -> int:
        """By what this rank does not compile."""
        return _number(sorted(self._refused()))


def _number(told: object) -> int:
    return zlib.crc32(repr(told).encode()) or 1
