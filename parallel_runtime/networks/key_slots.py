"""Slots: where the tokens of a ring rank lie in its buffer of keys and values, patch by patch.

A rank of the sequence group holds a *band* of every patch. A ring rank's slot is what its Ulysses group holds: all of
its text, then its bands of patch 0, of patch 1, and so on. In the synchronous steps tokens arrive rank by rank, in the
asynchronous ones patch by patch; both have to find the same place, or a step would lose some tokens and double others.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from .shares import split_sizes


@dataclass(frozen=True)
class Slots:
    """The split of one request's tokens over the ranks of a sequence group of ring × ulysses.

    Args:
        patches: image tokens of each patch.
        text: text tokens.
        ring, ulysses: degrees; rank u + ulysses·r of the group is at (r, u).
        text_first: whether a rank's text tokens stand before its image tokens.
    """

    patches: tuple[int, ...]
    text: int
    ring: int
    ulysses: int
    text_first: bool

    @property
    def degree(self) -> int:
        """Ranks of the group."""
        return self.ring * self.ulysses

    def bands(self, patch: int) -> tuple[int, ...]:
        """Tokens of a patch on every rank."""
        return split_sizes(self.patches[patch], self.degree)

    def shares(self) -> tuple[int, ...]:
        """Image tokens of all patches on every rank."""
        return tuple(
            sum(bands) for bands in zip(*(self.bands(patch) for patch in range(len(self.patches))), strict=True)
        )

    def rank_major(self) -> list[int]:
        """Image tokens in the order in which the synchronous steps split them: rank by rank, there patch by patch."""
        starts = [0, *accumulate(self.patches)]
        order: list[int] = []
        for rank in range(self.degree):
            for patch in range(len(self.patches)):
                low, high = self._band(patch, rank)
                order.extend(range(starts[patch] + low, starts[patch] + high))
        return order

    def lengths(self) -> tuple[int, ...]:
        """Tokens in the slot of every ring rank."""
        text = split_sizes(self.text, self.degree)
        shares = self.shares()
        members = [range(ring * self.ulysses, (ring + 1) * self.ulysses) for ring in range(self.ring)]
        return tuple(sum(text[rank] + shares[rank] for rank in ranks) for ranks in members)

    def rows(self, ring: int, patch: int | None, with_text: bool) -> list[int]:
        """Place in the slot of each token that the Ulysses exchange brings, in its order.

        Args:
            ring: whose slot.
            patch: None in the synchronous steps, which bring all patches.
            with_text: whether text comes along.
        """
        members = range(ring * self.ulysses, (ring + 1) * self.ulysses)
        text_sizes = split_sizes(self.text, self.degree)
        text_starts = [0, *accumulate(text_sizes[rank] for rank in members)]
        rows: list[int] = []
        for place, rank in enumerate(members):
            text = list(range(text_starts[place], text_starts[place + 1])) if with_text else []
            image = [row for p in self._which(patch) for row in self._image_rows(p, rank, members, text_starts[-1])]
            rows.extend(text + image if self.text_first else image + text)
        return rows

    def _which(self, patch: int | None) -> Sequence[int]:
        return range(len(self.patches)) if patch is None else (patch,)

    def _band(self, patch: int, rank: int) -> tuple[int, int]:
        """(start, stop) of a rank's band in its patch."""
        ends = [0, *accumulate(self.bands(patch))]
        return ends[rank], ends[rank + 1]

    def _image_rows(self, patch: int, rank: int, members: range, text: int) -> range:
        before = sum(sum(self.bands(p)[m] for m in members) for p in range(patch))
        start = text + before + sum(self.bands(patch)[m] for m in members if m < rank)
        return range(start, start + self.bands(patch)[rank])
