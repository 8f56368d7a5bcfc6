"""Which kinds of calls the ranks keep prepared: the steps of a run but the first need no PREPARE."""

from __future__ import annotations

import itertools
from collections import OrderedDict
from collections.abc import Hashable

import torch

from parallel_runtime.requests.requests import ConditioningRef

_CAPACITY = 16


class PreparedCalls:
    """Mirrors the ranks' prepared calls. A kind is a model, a conditioning, and the shapes of x and timestep."""

    def __init__(self) -> None:
        self._numbers = itertools.count(1)
        self._kept: OrderedDict[Hashable, int] = OrderedDict()
        self._to_drop: list[int] = []

    def find(self, kind: Hashable) -> int:
        """The number under which the ranks keep it; 0 where they do not."""
        if kind not in self._kept:
            return 0
        self._kept.move_to_end(kind)
        return self._kept[kind]

    def next_number(self) -> int:
        """A number for a call that is about to be prepared."""
        return next(self._numbers)

    def keep(self, kind: Hashable, number: int) -> None:
        """The ranks have prepared and run it."""
        before = self._kept.pop(kind, number)
        if before != number:
            self._to_drop.append(before)
        self._kept[kind] = number
        while len(self._kept) > _CAPACITY:
            self._to_drop.append(self._kept.popitem(last=False)[1])

    def clear(self) -> None:
        """Trust none of them any more."""
        self._to_drop += self._kept.values()
        self._kept.clear()

    def dropped(self) -> tuple[int, ...]:
        """Numbers that the ranks may forget; each is told once."""
        dropped, self._to_drop = tuple(self._to_drop), []
        return dropped


def kind_of(model: str, reference: ConditioningRef, x: torch.Tensor, timestep: torch.Tensor) -> Hashable:
    """What two calls have in common of which one prepares the other.

    Args:
        reference: a conditioning that the pool holds; its number says its contents.
    """
    return model, reference.id, reference.index, x.shape, x.dtype, timestep.shape, timestep.dtype
