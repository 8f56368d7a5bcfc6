"""Puts rank and job in front of every line that a rank writes, so that the pool's one log can be read."""

from __future__ import annotations

import io
import sys
from typing import TextIO


class RankOutput(io.TextIOBase):
    """Takes the place of sys.stdout and sys.stderr. (What libraries write past Python comes through as it is.)"""

    def __init__(self, rank: int, stream: TextIO):
        self.rank = rank
        self.job: int | None = None
        self._stream = stream
        self._rest = ""

    @classmethod
    def install(cls, rank: int) -> RankOutput:
        """Replace both streams of this process."""
        output = cls(rank, sys.stderr)
        sys.stdout = sys.stderr = output
        return output

    def write(self, text: str) -> int:
        """Whole lines go out with their prefix; the rest waits for its end."""
        *lines, self._rest = (self._rest + text).split("\n")
        prefix = f"[rank {self.rank}] " if self.job is None else f"[rank {self.rank} job {self.job}] "
        if lines:
            self._stream.write("".join(f"{prefix}{line}\n" for line in lines))
            self._stream.flush()
        return len(text)

    def fileno(self) -> int:
        """The stream's own, for faulthandler."""
        return self._stream.fileno()

    def flush(self) -> None:
        """Lines are flushed as they end."""
