"""The mesh of one plan: which rank works on which part, and the process groups its collectives run over.

A *part* of the work is addressed by one coordinate per mesh axis (data, cfg, pipe, ring, ulysses), ulysses innermost.
Two pairs of axes act as one: ring × ulysses split the token sequence, data × cfg split the batch.

A *layout* is all of that but the groups. It is pure, so a rank that only prepares a request has one; joining the
groups is collective, so it waits until all ranks run.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any

import torch
import torch.distributed as dist

from ..config import AXES, ParallelPlan
from .groups import GroupKey, Groups
from .links import Links, build_links, link_groups

_GROUPED: Mapping[str, tuple[str, ...]] = {
    "ulysses": ("ulysses",), "ring": ("ring",), "sequence": ("ring", "ulysses"), "batch": ("data", "cfg"),
    "members": AXES,
}  # fmt: skip
"""Groups of a mesh, by its fields, each with the axes that it joins."""


@dataclass(frozen=True)
class Layout:
    """One rank's part in the plan, by its global rank and its index on each axis of AXES. `speeds` are those of the
    ranks of its sequence group, in the order of `sequence_index`, where they are unlike: they then hold tokens in that
    proportion. The same numbers on all of them."""

    plan: ParallelPlan
    rank: int
    coordinate: Mapping[str, int]
    speeds: tuple[float, ...] | None = None

    @property
    def sequence_index(self) -> int:
        """Which share of the tokens is this rank's, below plan.sequence."""
        return self.coordinate["ring"] * self.plan.ulysses + self.coordinate["ulysses"]

    @property
    def batch_index(self) -> int:
        """Which share of the batch is this rank's, below plan.batch."""
        return self.coordinate["data"] * self.plan.cfg + self.coordinate["cfg"]

    @property
    def sequence_ranks(self) -> tuple[int, ...]:
        """Global ranks that share this rank's sequence, itself among them; neighbours."""
        first = self.rank - self.sequence_index
        return tuple(range(first, first + self.plan.sequence))


@dataclass(frozen=True)
class Mesh(Layout):
    """A layout, with the groups that the rank talks over; a group of one rank is None.

    Args:
        ulysses, ring: groups along that axis.
        sequence: group over which the token sequence is split, ring × ulysses; index is u + U·r.
        batch: group over which the batch is split, data × cfg; index is c + C·d.
        members: all ranks of the plan.
        peers: memory that the ranks of `sequence` share; see HeadRoutes in exchange/head_routes.py.
        links: to other stages where there are several.
    """

    ulysses: dist.ProcessGroup | None = field(default=None, repr=False)
    ring: dist.ProcessGroup | None = field(default=None, repr=False)
    sequence: dist.ProcessGroup | None = field(default=None, repr=False)
    batch: dist.ProcessGroup | None = field(default=None, repr=False)
    members: dist.ProcessGroup | None = field(default=None, repr=False)
    peers: Any = field(default=None, repr=False)
    links: Links | None = field(default=None, repr=False)


def single_rank_mesh() -> Mesh:
    """Return the mesh of one rank; needs no torch.distributed."""
    return Mesh(ParallelPlan(), 0, _coordinate(ParallelPlan(), 0))


def lay_out_plan(plan: ParallelPlan, rank: int, speeds: Sequence[float] | None = None) -> Layout | None:
    """Return a rank's part in a plan, None where it takes none. Pure; speeds are of all ranks (speeds.py)."""
    if rank >= plan.world_size:
        return None
    layout = Layout(plan, rank, _coordinate(plan, rank))
    if speeds is None:
        return layout
    own = tuple(speeds[other] for other in layout.sequence_ranks)
    return replace(layout, speeds=own if len(set(own)) > 1 else None)


def build_mesh(
    plan: ParallelPlan, rank: int, world_size: int, speeds: Sequence[float] | None = None, groups: Groups | None = None
) -> Mesh | None:
    """This rank's mesh of `plan` over the first plan.world_size ranks of the world, or None where it takes no part.

    Collective: every rank of the world calls it, also those that take no part, with the same plan and in the same
    order. Recordings are kept by mesh, so keep one per plan instead of building one per request. The default process
    group need not exist when the plan has one rank. `groups` are those of earlier meshes, which this one shares.
    """
    layout = lay_out_plan(plan, rank, speeds)
    groups = groups or Groups(rank, world_size)
    own: dict[str, Any] = {}
    for name, axes in _GROUPED.items():
        for key in _rows(plan, axes):
            group = groups.join(key)
            if rank in key[0]:
                own[name] = group
    links = build_links(plan, rank, groups)
    if layout is None:
        return None
    peers = groups.memory((layout.sequence_ranks, "")) if plan.sequence > 1 else None
    return Mesh(layout.plan, layout.rank, layout.coordinate, layout.speeds, **own, peers=peers, links=links)


def mesh_groups(plan: ParallelPlan) -> set[GroupKey]:
    """The groups that a plan's mesh has on all of its ranks."""
    return {key for axes in _GROUPED.values() for key in _rows(plan, axes)}.union(link_groups(plan))


def _rows(plan: ParallelPlan, axes: tuple[str, ...]) -> list[GroupKey]:
    """The sets of ranks that differ in these axes only; none where that is one rank each."""
    array = torch.arange(plan.world_size).reshape(plan.shape)
    rows = array.movedim([AXES.index(axis) for axis in axes], list(range(-len(axes), 0))).flatten(-len(axes))
    return [(tuple(row), "") for row in rows.reshape(-1, rows.shape[-1]).tolist()] if rows.shape[-1] > 1 else []


def _coordinate(plan: ParallelPlan, rank: int) -> Mapping[str, int]:
    place = torch.unravel_index(torch.tensor(rank), plan.shape)
    return MappingProxyType({axis: int(index) for axis, index in zip(AXES, place, strict=True)})
