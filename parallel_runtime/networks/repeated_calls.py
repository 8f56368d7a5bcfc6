"""What calls of a network that repeat have left on a rank: CUDA graphs of forwards, and compiled blocks."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Mapping
from typing import Any, Protocol

from ..acceleration.recordings import RecordedForward
from ..mesh.agreement import NONE, agreed_history, offer_history
from ..mesh.mesh import Layout, Mesh
from ..streaming.block_stream import BlockStream

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


class RepeatedCalls:
    """A network's calls, which are recorded and compiled where they repeat. `mesh` is the one at hand."""

    mesh: Mesh
    _compilation: BlockCompilation | None
    _recorded: RecordedForward | None
    stream: BlockStream | None = None

    def call_at_once(self, *args: Any, **kwargs: Any) -> Any:
        """What a call does, without recording."""
        raise NotImplementedError

    def record_or_call(self, *args: Any, **kwargs: Any) -> Any:
        """Call, in the way that is fastest by now. Collective over the sequence group."""
        with self.stream.reading() if self.stream is not None else contextlib.nullcontext():
            return self._launch(args, kwargs)

    def _launch(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self._recorded is None:
            return self.call_at_once(*args, **kwargs)
        compiled = self._compilation is not None and self._compilation.in_use
        return self._recorded(self.mesh, args, kwargs, compiled)

    @property
    def before_compiling(self) -> Callable[[], None]:
        """Called once, before the first forward that may compile."""
        return self._compilation.before_compiling if self._compilation is not None else lambda: None

    @before_compiling.setter
    def before_compiling(self, tell: Callable[[], None]) -> None:
        if self._compilation is not None:
            self._compilation.before_compiling = tell

    def offers(self, layout: Layout) -> dict[str, int]:
        """What this rank has recorded over the layout's sequence group, and tells of its graphs, for `go_on`."""
        ranks = layout.sequence_ranks
        recorded = self._recorded.history(ranks) if self._recorded is not None else NONE
        graphs = self._compilation.offers() if self._compilation is not None else {}
        return offer_history(ranks, recorded) | graphs

    def go_on(self, agreed: Mapping[str, int]) -> None:
        """Use recordings over the mesh at hand, and graphs, as all ranks can; before a request's first forward.

        Args:
            agreed: of all ranks' `offers`.
        """
        history = agreed_history(self.mesh.sequence_ranks, agreed)
        if self._recorded is not None and history is not None:
            self._recorded.go_on(self.mesh.sequence_ranks, history)
        if self._compilation is not None:
            self._compilation.go_on(agreed)

    def leave(self, mesh: Mesh) -> None:
        """Let go of what was recorded over a mesh whose groups will be gone."""
        if self._recorded is not None:
            self._recorded.leave(mesh)

    def forget_recordings(self) -> None:
        """Let go of the recordings and their memory, on this rank alone."""
        if self._recorded is not None:
            self._recorded.lose()

    def forget_calls(self) -> None:
        """Let go of recordings. What is compiled stays."""
        if self._recorded is not None:
            self._recorded.clear()
