"""Whose the tokens of one forward are: numbers alone, the same on every rank, and never changed but by another."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from ..errors import UnsupportedModelError
from ..said import said
from .shares import split_sizes


@dataclass(frozen=True)
class SequenceLayout:
    """The split of a forward's tokens over a sequence group, as far as the forward has come.

    Args:
        degree: ranks that share the tokens; 1 where every rank computes the whole.
        speeds: of the ranks, in whose proportion tokens are split; None for equal shares.
        assigned: image tokens of every rank where a pipeline says so, instead of `speeds`.
        text: with `assigned`, arguments that hold text, which is split by `speeds` as always.
        totals: tokens of each argument or embedding that was counted so far, before it is split.
        taken: something is split already, so this forward cannot be computed whole any more.
    """

    degree: int
    speeds: tuple[float, ...] | None = None
    assigned: tuple[int, ...] | None = None
    text: tuple[str, ...] = ()
    totals: Mapping[str, int] = field(default_factory=dict)
    taken: bool = False

    def count(self, totals: Mapping[str, int]) -> SequenceLayout:
        """With the tokens of more arguments."""
        return replace(self, totals={**self.totals, **totals})

    def take(self) -> SequenceLayout:
        """With something split."""
        return self if self.taken else replace(self, taken=True)

    def whole(self, attended: Sequence[str]) -> SequenceLayout:
        """With nothing split: a rank would be left without any token, which diffusers cannot compute, so every rank
        computes the whole, of a handful of tokens.

        Raises:
            UnsupportedModelError: something is split already.
        """
        if self.taken:
            raise self.too_small(attended)
        return replace(self, degree=1)

    def weights_of(self, name: str) -> Sequence[float] | None:
        """In which proportion the tokens of an argument are split, None for equal shares."""
        return self.speeds if self.assigned is None or name in self.text else self.assigned

    def lengths(self, attended: Sequence[str]) -> tuple[int, ...] | None:
        """Tokens of every rank that an attention over these arguments has; None while some are not counted."""
        if not self.totals.keys() >= set(attended):
            return None
        shares = [split_sizes(self.totals[name], self.degree, self.weights_of(name)) for name in attended]
        return tuple(sum(of_rank) for of_rank in zip(*shares, strict=True))

    def too_small(self, attended: Sequence[str]) -> UnsupportedModelError:
        """The error of tokens that are fewer than their ranks."""
        return UnsupportedModelError(
            said(
                "A picture of {totals} tokens cannot be split over {degree} ranks.",
                totals=self.totals[attended[0]],
                degree=self.degree,
            ),
            "Use a larger picture, or fewer ranks for one picture.",
        )
