"""Entries of menus for which prompts may hold other values. No ComfyUI needed."""

from __future__ import annotations

from collections.abc import Iterable


class MenuEntry(str):
    """A text that equals what `also` holds, so that ComfyUI, which looks for a value among the entries of its own
    input, takes that and refuses any other at that input alone."""

    also: tuple[object, ...]

    def __new__(cls, text: str, also: Iterable[object] = ()) -> MenuEntry:
        made = super().__new__(cls, text)
        made.also = tuple(also)
        return made

    def __eq__(self, other: object) -> bool:
        # 1 equals True, and stands for another entry.
        return str.__eq__(self, other) is True or any(type(other) is type(each) and other == each for each in self.also)

    def __ne__(self, other: object) -> bool:
        return not self == other

    __hash__ = str.__hash__


def numbers(entries: Iterable[str]) -> list[str]:
    """Entries of which those that are numbers are taken as numbers as well."""
    return [MenuEntry(entry, [int(entry)]) if entry.isdecimal() else entry for entry in entries]
