"""Compiles blocks beside the pictures: forwards run as they are until another process has made the graphs.

The graphs go to the compile cache on disk. The rank's own compilation of the same graphs, at the swap, then finds them
there and takes little more than tracing.

When to swap is agreed by the ranks of a sequence group, forward by forward: compiled blocks may exchange in another way
than plain ones. A rank votes only while a kind of call is pending, which follows from the calls that all of them have
seen, so all of them vote or none.
"""

from __future__ import annotations

import enum
import logging
from collections import OrderedDict
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
import torch.distributed as dist

from ..mesh.agreement import NONE
from ..mesh.mesh import Mesh
from .swap import swap

log = logging.getLogger(__name__)

_KEPT = 256
"""Kinds of call that are remembered. All ranks forget the same ones."""


class Progress(enum.IntEnum):
    """How far one rank is with one kind of call; the ranks agree on the least."""

    FAILED = -1
    WORKING = 0
    DONE = 1


class Compiler(Protocol):
    """Makes graphs somewhere else."""

    def watch(self) -> None:
        """A call of a new kind runs plainly now."""
        ...

    def submit(self, number: int, mesh: Mesh, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """Begin with a call of these arguments over this mesh, right after it ran plainly."""
        ...

    def progress(self, number: int) -> Progress:
        """How far it is."""
        ...

    def close(self) -> None:
        """Give up what is under way."""
        ...


class _State(enum.Enum):
    NEW = enum.auto()
    PENDING = enum.auto()
    READY = enum.auto()
    NEVER = enum.auto()


@dataclass
class _Kinds:
    """The kinds of call over one sequence group. Its ranks have the same under the same number (agreement.py)."""

    history: int = NONE
    known: OrderedDict[Hashable, tuple[int, _State]] = field(default_factory=OrderedDict)


class CompileAhead:
    """Which kinds of call run compiled, on one rank.

    Args:
        compiler: told of every new kind of call.
    """

    def __init__(self, compiler: Compiler):
        self._compiler = compiler
        self._over: dict[tuple[int, ...], _Kinds] = {}
        self._count = 0

    def history(self, ranks: tuple[int, ...]) -> int:
        """The number of what is known of calls over a sequence group of these ranks."""
        return self._over[ranks].history if ranks in self._over else NONE

    def go_on(self, ranks: tuple[int, ...], history: int) -> None:
        """Go on with what is known under this number, which all ranks of the group agreed on; else begin anew."""
        if self.history(ranks) != history:
            self._over[ranks] = _Kinds(history)

    def run(self, mesh: Mesh, args: tuple[Any, ...], kwargs: dict[str, Any], call: Callable[[bool], Any]) -> Any:
        """Return call(whether it runs compiled). Collective over the mesh's sequence group."""
        kinds = self._over.setdefault(mesh.sequence_ranks, _Kinds()).known
        kind = _kind(mesh, args, kwargs)
        number, state = kinds.get(kind, (0, _State.NEW))
        if state is _State.PENDING:
            state = self._settle(number, mesh)
            kinds[kind] = number, state
            if state is _State.READY:
                return swap(call)
        if state is not _State.NEW:
            return call(state is _State.READY)
        self._compiler.watch()
        output = call(False)
        self._count += 1
        kinds[kind] = self._count, _State.PENDING
        while len(kinds) > _KEPT:
            kinds.popitem(last=False)
        self._compiler.submit(self._count, mesh, args, kwargs)
        return output

    def _settle(self, number: int, mesh: Mesh) -> _State:
        agreed = _least(self._compiler.progress(number), mesh)
        if agreed == Progress.WORKING:
            return _State.PENDING
        if agreed == Progress.FAILED:
            log.warning("Blocks are not compiled for this kind of call, as a rank's compiler could not.")
            return _State.NEVER
        return _State.READY

    def give_up(self) -> None:
        """End the compiler, where the next call comes only after all ranks have agreed anew. Groups that waited for it
        begin anew then, and find on disk what is made; the others go on with the graphs that they have."""
        self._compiler.close()
        self._over = {
            ranks: kinds
            for ranks, kinds in self._over.items()
            if all(state is not _State.PENDING for _, state in kinds.known.values())
        }

    def leave_world(self) -> None:
        """Forget the calls over groups. The compiler knows the old world, so another takes its place."""
        self.give_up()
        self._over = {ranks: kinds for ranks, kinds in self._over.items() if len(ranks) == 1}


def _kind(mesh: Mesh, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Hashable:
    """What calls of one kind have in common. Cheap, as every step asks."""
    return mesh.plan, mesh.speeds, _shapes(args), _shapes(kwargs)


def _shapes(value: Any) -> Hashable:
    if isinstance(value, torch.Tensor):
        return value.shape, value.dtype
    if isinstance(value, Mapping):
        return tuple((name, _shapes(each)) for name, each in value.items())
    if isinstance(value, list | tuple):
        return tuple(_shapes(each) for each in value)
    return value if value is None or isinstance(value, str | bool | int | float) else str(type(value))


def _least(progress: Progress, mesh: Mesh) -> int:
    """The least of the sequence group. Collective over it, on the CPU: no GPU waits."""
    if mesh.sequence is None:
        return progress
    vote = torch.tensor(int(progress))
    dist.all_reduce(vote, op=dist.ReduceOp.MIN, group=mesh.sequence)
    return int(vote.item())
