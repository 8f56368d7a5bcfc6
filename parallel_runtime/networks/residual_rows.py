"""Which rows of a ControlNet's residuals a rank reads: those of its own tokens, as its blocks noted in a call.

Residuals are added between blocks to tensors of the whole length, of which a rank reads its own rows. After the last
block of a list, and where a patch sees what blocks return, every rank has all rows, and reads all.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ..mesh.mesh import Layout
from ..requests.trees import flatten
from .tables.blocks import Blocks

_KEPT = 16
"""Kinds of calls of which it is remembered."""
Interval = tuple[int, int]


@dataclass(frozen=True)
class Noted:
    """One run of a block.

    Args:
        lengths: argument -> its tokens.
        own: argument -> this rank's of them; None where the rank has all of what the block returned.
    """

    lengths: Mapping[str, int]
    own: Mapping[str, Interval] | None = None


Notes = dict[str, list[Noted]]
"""Path of a list -> its blocks, in their order."""


class ResidualRows:
    """Remembers the notes of calls with residuals: a recorded call runs no block."""

    def __init__(self) -> None:
        self._known: OrderedDict[Hashable, Notes] = OrderedDict()
        self.last: Notes = {}
        """Of the last call."""

    def called(self, kind: Hashable, notes: Notes | None) -> None:
        """A call has run.

        Args:
            kind: see `kind_of`; None of a call that is never replayed.
            notes: of its blocks, None where it was replayed.
        """
        if notes is not None and kind is not None:
            self._known[kind] = notes
            while len(self._known) > _KEPT:
                self._known.popitem(last=False)
        self.last = notes if notes is not None else self._known.get(kind, {})


def rows_read(lists: Sequence[Blocks], notes: Notes, residuals: Any, tokens: Mapping[str, int]) -> dict[str, Interval]:
    """The rows on dim 1 that this rank reads, by name.

    Args:
        residuals: as a ControlNet gives them, with a name in each tensor's place.
        tokens: rows of each.

    Returns:
        Nothing of a tensor of which the rank may read all.
    """
    if not notes or not isinstance(residuals, Mapping):
        return {}
    taken = {blocks.control[0]: blocks for blocks in lists if blocks.control}
    read: dict[str, Interval] = {}
    for key, names in residuals.items():
        for index, name in enumerate(names):
            if name is None:
                continue
            start, stop = _interval(taken.get(key), notes, index, tokens[name])
            before = read.get(name, (start, stop))
            read[name] = min(start, before[0]), max(stop, before[1])
    return {name: each for name, each in read.items() if each != (0, tokens[name])}


def _interval(blocks: Blocks | None, notes: Notes, index: int, tokens: int) -> Interval:
    noted = notes.get(blocks.path, []) if blocks is not None else []
    own = noted[index].own if index < len(noted) else None
    if blocks is None or own is None:
        return 0, tokens
    _, stream, *behind = blocks.control
    first = sum(_length(notes, name) for name in behind)
    start, stop = (min(max(each - first, 0), tokens) for each in own[stream])
    return start, stop


def _length(notes: Notes, stream: str) -> int:
    return next(each.lengths[stream] for noted in notes.values() for each in noted if stream in each.lengths)


def kind_of(x: torch.Tensor, conditioning: Mapping[str, Any], mesh: Layout) -> Hashable:
    """What two calls have in common whose tokens are shared out alike."""
    tensors: list[torch.Tensor] = []
    form = repr(flatten(dict(conditioning), tensors))
    speeds = tuple(mesh.speeds) if mesh.speeds is not None else None
    return mesh.plan, mesh.sequence_index, speeds, tuple(x.shape), form, tuple(tensor.shape for tensor in tensors)
