"""Shares of rows and tokens: how ranks split them, and bring them together. Every rank computes the same numbers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from ..mesh.mesh import Layout, Mesh

# The same collective; torch 2.13 renamed it and warns at every call of the old name.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


def split_sizes(total: int, degree: int, weights: Sequence[float] | None = None) -> tuple[int, ...]:
    """Return the rows of every rank, `total` together: in proportion to `weights`, their speeds, above 0 and the same
    numbers on all ranks, at least one to each where there are enough. None splits as equally as can be, and the first
    `total % degree` ranks get one more."""
    if weights is None or len(set(weights)) == 1:
        share, rest = divmod(total, degree)
        return tuple(share + (rank < rest) for rank in range(degree))
    least = min(1, total // degree)
    left = total - least * degree
    # Rows beyond the one of each, so that shares are as near to the proportion as can be: a rank whose share is below
    # one gets its one, and the others share the rest.
    wanted = [max(0.0, total * weight / sum(weights) - least) for weight in weights]
    exact = [left * part / sum(wanted) for part in wanted] if left else [0.0] * degree
    sizes = [int(part) for part in exact]
    # The largest remainders round up, the first rank of equal ones: the same on every rank.
    order = sorted(range(degree), key=lambda rank: (sizes[rank] - exact[rank], rank))
    for rank in order[: left - sum(sizes)]:
        sizes[rank] += 1
    return tuple(least + size for size in sizes)


def gather_shares(
    share: Tensor, dim: int, total: int, group: dist.ProcessGroup, degree: int, weights: Sequence[float] | None = None
) -> Tensor:
    """Put the shares of `total` rows on `dim` together again. Collective over the group; every rank gets the whole.
    `share` is this rank's rows, maybe none; the other dims are alike on all ranks."""
    sizes = split_sizes(total, degree, weights)
    longest = max(sizes)
    rows = share.movedim(dim, 0)
    if rows.shape[0] != longest:  # pad on the wire, by sizes known to all: the collective wants equally many rows
        rows = F.pad(rows, (0, 0) * (rows.dim() - 1) + (0, longest - rows.shape[0]))
    padded = rows.contiguous()
    gathered = padded.new_empty((degree * longest, *padded.shape[1:]))
    _all_gather(gathered, padded, group=group)
    if min(sizes) != longest:
        gathered = torch.cat([part[:size] for part, size in zip(gathered.split(longest), sizes, strict=True)])
    return gathered.movedim(0, dim)


@dataclass(frozen=True)
class Streams:
    """Token streams that one attention goes over, and what ranks compute of them now: all, or those of a patch."""

    lengths: tuple[int, ...]  # tokens of each stream
    sizes: tuple[tuple[int, ...], ...]  # of each stream, what each rank has
    index: int  # this rank's
    starts: tuple[int, ...]  # of what is computed, in each stream
    shared: tuple[bool, ...]  # of each stream, whether ranks have shares of it; else each has all

    @classmethod
    def share_out(cls, lengths: Iterable[int], mesh: Mesh) -> Streams:
        """Share out streams over the ranks of a mesh. Pure: all ranks get the same."""
        lengths = tuple(lengths)
        sizes = tuple(split_sizes(length, mesh.plan.sequence, mesh.speeds) for length in lengths)
        return cls(lengths, sizes, mesh.sequence_index, (0,) * len(sizes), (True,) * len(sizes))

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
        one = slice(stream, stream + 1)
        return Streams(self.lengths[one], self.sizes[one], self.index, self.starts[one], self.shared[one])

    def intervals(self) -> list[tuple[int, int]]:
        """(start, stop) of this rank's tokens of each stream, among the tokens of all streams."""
        found = []
        firsts = (0, *accumulate(self.lengths[:-1]))
        for first, start, sizes, shared in zip(firsts, self.starts, self.sizes, self.shared, strict=True):
            begin = first + start + (sum(sizes[: self.index]) if shared else 0)
            found.append((begin, begin + sizes[self.index]))
        return found

    def spans(self) -> list[tuple[int, int]]:
        """(start, stop) of what all ranks together compute of each stream, in the stream."""
        sizes = [sum(sizes) if shared else sizes[0] for sizes, shared in zip(self.sizes, self.shared, strict=True)]
        return [(start, start + size) for start, size in zip(self.starts, sizes, strict=True)]


def share_of_batch(batch: int, mesh: Layout, together: int = 1) -> tuple[int, int]:
    """Return this rank's rows (start, stop) out of `batch`; start == stop where there are fewer rows than ways. So many
    neighbouring rows as are `together` stay on one rank; `batch` is a multiple of it."""
    bounds = (0, *accumulate(split_sizes(batch // together, mesh.plan.batch)))
    return together * bounds[mesh.batch_index], together * bounds[mesh.batch_index + 1]


def some_have_no_rows(batch: int, mesh: Layout, together: int = 1) -> bool:
    """Whether there are fewer rows than ways, for `share_of_batch`. The same on all ranks."""
    return batch // together < mesh.plan.batch


def gather_batch(rows: Tensor, batch: int, mesh: Mesh, together: int = 1) -> Tensor:
    """Return all rows on every rank, of this rank's on dim 0, maybe none; see `share_of_batch`. Collective over
    `mesh.batch`, which every rank of it must join; the other dims and the dtype are the same on all ranks."""
    if mesh.batch is None:
        return rows
    groups = rows.reshape(rows.shape[0] // together, together, *rows.shape[1:])
    return gather_shares(groups, 0, batch // together, mesh.batch, mesh.plan.batch).flatten(0, 1)


def join_both(key: Tensor, value: Tensor, gather: Callable[[Tensor], Tensor]) -> tuple[Tensor, Tensor]:
    """Keys and values of all ranks, by one exchange where they are alike but for their width."""
    if key.shape[:-1] != value.shape[:-1] or key.dtype != value.dtype:
        return gather(key), gather(value)
    key, value = gather(torch.cat([key, value], -1)).split([key.shape[-1], value.shape[-1]], -1)
    return key, value
