"""Shares: how n rows are split over P ranks, and how they come together again. Every rank computes the same numbers."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
import torch.nn.functional as F

# The same collective; torch 2.13 renamed it and warns at every call of the old name.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


def split_sizes(total: int, degree: int, weights: Sequence[float] | None = None) -> tuple[int, ...]:
    """Return the rows of every rank, `total` together.

    Args:
        weights: speed of every rank, above 0 and the same numbers on all ranks: rows are split in proportion, at least
            one to each where there are enough. None splits as equally as can be, and the first `total % degree` ranks
            get one more.
    """
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
    share: torch.Tensor,
    dim: int,
    total: int,
    group: dist.ProcessGroup,
    degree: int,
    weights: Sequence[float] | None = None,
) -> torch.Tensor:
    """Put the shares of `total` rows on `dim` together again. Collective over the group; every rank gets the whole.

    Args:
        share: this rank's rows as `take_share` gives them, maybe none; the other dims are alike on all ranks.
    """
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
