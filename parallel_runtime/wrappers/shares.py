"""Shares: how n rows are dealt to P ranks, and how they come together again. Every rank computes the same numbers."""

from __future__ import annotations

from itertools import accumulate

import torch
import torch.distributed as dist
import torch.nn.functional as F

# The same collective; torch 2.13 renamed it and warns at every call of the old name.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


def split_sizes(total: int, degree: int) -> tuple[int, ...]:
    """Return the rows of every rank: as equal as can be, the first `total % degree` ranks have one more."""
    share, rest = divmod(total, degree)
    return tuple(share + (rank < rest) for rank in range(degree))


def take_share(tensor: torch.Tensor, dim: int, degree: int, index: int) -> torch.Tensor:
    """Return rank `index`'s rows of `dim`, a view."""
    sizes = split_sizes(tensor.shape[dim], degree)
    start = (0, *accumulate(sizes))[index]
    return tensor.narrow(dim, start, sizes[index])


def gather_shares(share: torch.Tensor, dim: int, total: int, group: dist.ProcessGroup, degree: int) -> torch.Tensor:
    """Put the shares of `total` rows on `dim` together again. Collective over the group; every rank gets the whole.

    Args:
        share: this rank's rows as `take_share` deals them, maybe none; the other dims are alike on all ranks.
    """
    sizes = split_sizes(total, degree)
    rows = share.movedim(dim, 0)
    # Not every rank has equally many rows and the collective wants it so: pad on the wire, by sizes known to all.
    padded = F.pad(rows, (0, 0) * (rows.dim() - 1) + (0, sizes[0] - rows.shape[0])).contiguous()
    gathered = padded.new_empty((degree * sizes[0], *padded.shape[1:]))
    _all_gather(gathered, padded, group=group)
    if sizes[0] != sizes[-1]:
        gathered = torch.cat([part[:size] for part, size in zip(gathered.split(sizes[0]), sizes, strict=True)])
    return gathered.movedim(0, dim)
