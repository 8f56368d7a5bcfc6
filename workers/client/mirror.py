"""What the ranks are known to hold of one kind: conditionings, prepared calls, patches, networks beside a model."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable, Hashable, Iterator
from typing import Generic, TypeVar

_DOUBTED = 4096
"""Of what was told last, as much is told again where requests fail, which may have told it."""

Name = TypeVar("Name", bound=Hashable)
Known = TypeVar("Known")


class Mirror(Generic[Name, Known]):
    """Names of things that the ranks hold, in the order of their last use, and what this side knows of each.

    The ranks forget only what they are told to. What is not certain counts as not held, and they are told to forget it.

    Args:
        most: where there are more, the one that was used longest ago goes.
    """

    def __init__(self, most: int | None = None):
        self._held: OrderedDict[Name, Known] = OrderedDict()
        self._untold: list[Name] = []
        self._told: deque[Name] = deque(maxlen=_DOUBTED)
        self._most = most

    def __contains__(self, name: Name) -> bool:
        return name in self._held

    def __iter__(self) -> Iterator[Name]:
        return iter(list(self._held))

    def __len__(self) -> int:
        return len(self._held)

    def known(self) -> list[Known]:
        """What is known of each, in their order."""
        return list(self._held.values())

    def find(self, fits: Callable[[Known], bool]) -> Name | None:
        """The name of the last used one that fits, which is used now; None where none does."""
        for name, known in reversed(self._held.items()):
            if fits(known):
                self._held.move_to_end(name)
                return name
        return None

    def hold(self, name: Name, known: Known) -> None:
        """The ranks hold it from now on, or use it again."""
        self._held[name] = known
        self._held.move_to_end(name)
        if self._most is not None and len(self._held) > self._most:
            self.let_go(next(iter(self._held)))

    def let_go(self, *names: Name) -> None:
        """Count on these no longer."""
        for name in names:
            if name in self._held:
                del self._held[name]
                self._untold.append(name)

    def forget(self) -> None:
        """Count on none any more."""
        self.let_go(*self._held)

    def doubt(self) -> None:
        """A request has failed: count on none any more, nor on what was told having been heard."""
        self._untold += [name for name in self._told if name not in self._held]
        self._told.clear()
        self.forget()

    def untold(self, most: int | None = None) -> tuple[Name, ...]:
        """What the ranks are to forget before they are given others; each is told once, until a request fails."""
        names, self._untold = self._untold[:most], self._untold[len(self._untold[:most]) :]
        self._told.extend(names)
        return tuple(names)
