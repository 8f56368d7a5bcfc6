"""Token streams, one after the other, and what each rank has of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from ...mesh.mesh import Mesh
from ..shares import split_sizes


@dataclass(frozen=True)
class Streams:
    """Token streams that one attention goes over, and the shares of all ranks.

    Args:
        lengths: tokens of each stream.
        sizes: of each stream, what each rank has.
        index: this rank's.
    """

    lengths: tuple[int, ...]
    sizes: tuple[tuple[int, ...], ...]
    index: int

    @classmethod
    def share_out(cls, lengths: Sequence[int], mesh: Mesh) -> Streams:
        """Share out streams over the ranks of a mesh. Pure: all ranks get the same."""
        sizes = tuple(split_sizes(length, mesh.plan.sequence, mesh.speeds) for length in lengths)
        return cls(tuple(lengths), sizes, mesh.sequence_index)

    @property
    def enough(self) -> bool:
        """Every rank has some of every stream."""
        return all(min(sizes) > 0 for sizes in self.sizes)

    @property
    def total(self) -> int:
        """Tokens of all streams."""
        return sum(self.lengths)

    @property
    def own(self) -> tuple[int, ...]:
        """This rank's tokens of each stream."""
        return tuple(sizes[self.index] for sizes in self.sizes)

    def counts(self) -> tuple[int, ...]:
        """Tokens of each rank, of all streams together."""
        return tuple(map(sum, zip(*self.sizes, strict=True)))

    def only(self, stream: int) -> Streams:
        """One of the streams."""
        return Streams((self.lengths[stream],), (self.sizes[stream],), self.index)

    def intervals(self) -> list[tuple[int, int]]:
        """(start, stop) of this rank's tokens of each stream, among the tokens of all streams."""
        firsts = (0, *accumulate(self.lengths))
        starts = [first + sum(sizes[: self.index]) for first, sizes in zip(firsts, self.sizes, strict=False)]
        return [(start, start + own) for start, own in zip(starts, self.own, strict=True)]
