"""The batch split: rows of a ready batch (CFG branches, images) split over data × cfg, gathered after the forward.

All ranks of a sequence group have the same share, so they agree on whether there is anything to compute. A rank
without rows skips the forward, and still joins the gather.
"""

from __future__ import annotations

from itertools import accumulate

import torch

from ..mesh.mesh import Layout, Mesh
from .shares import gather_shares, split_sizes


def share_of_batch(batch: int, mesh: Layout, together: int = 1) -> tuple[int, int]:
    """Return this rank's rows (start, stop) out of `batch`; start == stop where there are fewer rows than ways.

    Args:
        together: neighbouring rows that stay on one rank; `batch` is a multiple of it.
    """
    bounds = (0, *accumulate(split_sizes(batch // together, mesh.plan.batch)))
    return together * bounds[mesh.batch_index], together * bounds[mesh.batch_index + 1]


def some_have_no_rows(batch: int, mesh: Layout, together: int = 1) -> bool:
    """Whether there are fewer rows than ways, for `share_of_batch`. The same on all ranks."""
    return batch // together < mesh.plan.batch


def gather_batch(rows: torch.Tensor, batch: int, mesh: Mesh, together: int = 1) -> torch.Tensor:
    """Return all rows on every rank. Collective over `mesh.batch`, which every rank of it must join.

    Args:
        rows: this rank's share on dim 0, (0, ...) where it has none; the other dims and the dtype are the same on
            all ranks.
        batch: rows of the whole call.
        together: see `share_of_batch`.
    """
    if mesh.batch is None:
        return rows
    groups = rows.reshape(rows.shape[0] // together, together, *rows.shape[1:])
    return gather_shares(groups, 0, batch // together, mesh.batch, mesh.plan.batch).flatten(0, 1)
