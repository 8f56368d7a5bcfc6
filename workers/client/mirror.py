"""What the ranks are known to hold of one kind: conditionings, prepared calls."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Generic, TypeVar

Known = TypeVar("Known")


class Mirror(Generic[Known]):
    """Numbers of things that the ranks hold, in the order of their last use, and what this side knows of each.

    A request that brings another one names all that stay, so that the ranks hold no others: what is not certain after
    a failure just counts as not held.

    Args:
        most: where there are more, the one that was used longest ago goes.
    """

    def __init__(self, most: int):
        self._held: OrderedDict[int, Known] = OrderedDict()
        self._most = most

    @property
    def numbers(self) -> tuple[int, ...]:
        """Of all that are held, the one that was used longest ago first."""
        return tuple(self._held)

    def find(self, fits: Callable[[Known], bool]) -> int | None:
        """The number of the last used one that fits, which is used now; None where none does."""
        for number, known in reversed(self._held.items()):
            if fits(known):
                self._held.move_to_end(number)
                return number
        return None

    def hold(self, number: int, known: Known) -> None:
        """The ranks hold it from now on, or use it again."""
        self._held[number] = known
        self._held.move_to_end(number)
        if len(self._held) > self._most:
            self._held.popitem(last=False)

    def clear(self) -> None:
        """Count on none any more."""
        self._held.clear()
