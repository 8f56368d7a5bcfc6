"""Whether a network's blocks run compiled, and what must hold around a forward that may compile them."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Mapping
from typing import Protocol

log = logging.getLogger(__name__)

_ROOM = "graphs that blocks may still get"


class Compiled(Protocol):
    """Blocks that can run compiled."""

    @property
    def room(self) -> int:
        """How many graphs a kind of block may still get, the least of all kinds; 0 where that is too few for a call."""
        ...

    def use(self, compiled: bool) -> None:
        """Run them so, or as they are, from the next forward on."""
        ...

    def compiling(self) -> contextlib.AbstractContextManager[None]:
        """What must hold around every forward."""
        ...

    def undo(self) -> None:
        """Leave the blocks as they were."""
        ...


class BlockCompilation:
    """The compiled blocks of one wrapped network. What is not compiled yet is compiled when it first runs."""

    def __init__(self, compiled: Compiled):
        self._compiled = compiled
        self.in_use = True
        self.before_compiling: Callable[[], None] = lambda: None
        """Called once, before the first forward that may compile."""
        self._announced = False
        compiled.use(True)

    def offers(self) -> dict[str, int]:
        """What this rank tells of its graphs, for `go_on`."""
        return {_ROOM: self._compiled.room}

    def go_on(self, agreed: Mapping[str, int]) -> None:
        """Run a request's blocks compiled, or as they are where some rank has too many graphs already.

        Args:
            agreed: the least of all ranks' `offers`.
        """
        if _ROOM in agreed:  # a call that repeats goes on as it began
            self.use(agreed[_ROOM] > 0)

    def use(self, compiled: bool) -> None:
        """Run the blocks compiled, or as they are, from the next forward on. The results are equal up to rounding."""
        if compiled == self.in_use:
            return
        self.in_use = compiled
        self._compiled.use(compiled)
        if not compiled:
            log.warning("Blocks run as they are from now on: calls of too many kinds have been compiled.")

    def around_forward(self) -> contextlib.AbstractContextManager[None]:
        """What must hold while the blocks run."""
        if not self.in_use:
            return contextlib.nullcontext()
        if not self._announced:
            self._announced = True
            self.before_compiling()
        return self._compiled.compiling()

    def undo(self) -> None:
        """Leave the blocks as they were."""
        self._compiled.undo()
