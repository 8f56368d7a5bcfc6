"""The mesh of one plan: which rank works on which part, and the process groups its collectives run over.

A *part* of the work is addressed by one coordinate per mesh axis (data, cfg, pipe, ring, ulysses), ulysses innermost.
Two pairs of axes act as one: ring × ulysses split the token sequence, data × cfg split the batch.

A *layout* is all of that but the groups. It is pure, for PREPARE; joining the groups is collective, so it waits for
RUN."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

import torch
import torch.distributed as dist

from ..config import AXES, ParallelPlan

GroupKey = tuple[tuple[int, ...], str]
"""Global ranks, and what the group is for where other messages between the same ranks must not come in between."""
_GROUPED: Mapping[str, tuple[str, ...]] = {
    "ulysses": ("ulysses",), "ring": ("ring",), "sequence": ("ring", "ulysses"), "batch": ("data", "cfg"),
    "members": AXES,
}  # fmt: skip
"""Groups of a mesh, by its fields, each with the axes that it joins."""


class Groups:
    """The process groups that this rank knows of, by their ranks: plans whose axes join the same ranks share one. Every
    method is collective over the world: all ranks call it with the same keys in the same order, also those that are in
    none of the groups, because torch numbers groups as they are made. `share` makes the memory that the ranks of a
    group share (HeadRoutes), if they share some."""

    def __init__(self, rank: int, world_size: int, share: Callable[[dist.ProcessGroup], Any] | None = None):
        self._rank = rank
        self._world = tuple(range(world_size))
        self._made: dict[GroupKey, dist.ProcessGroup | None] = {}
        self._share = share
        self._memory: dict[GroupKey, Any] = {}

    def join(self, key: GroupKey) -> dist.ProcessGroup | None:
        """Return the group of a key, made where it is new; None for a rank outside of it."""
        ranks, purpose = key
        if ranks == self._world and not purpose:
            return dist.group.WORLD  # there from the start, with its communicators
        if key not in self._made:
            group = dist.new_group(list(ranks))
            self._made[key] = group if self._rank in ranks else None
        return self._made[key]

    def memory(self, key: GroupKey) -> Any:
        """The memory that the ranks of a group share; None for a rank outside of it. No collective."""
        group = self.join(key)  # made before
        if group is not None and self._share is not None and key not in self._memory:
            self._memory[key] = self._share(group)
        return self._memory.get(key)

    def free_memory(self) -> None:
        """Let all shared memory go, but for what a recording still holds."""
        for memory in self._memory.values():
            memory.free()

    def keep(self, used: Collection[GroupKey]) -> None:
        """Destroy all other groups. What was recorded over one must be gone before."""
        for key in [key for key in self._made if key not in used]:
            group = self._made.pop(key)
            self._memory.pop(key, None)
            if group is not None:
                dist.destroy_process_group(group)


@dataclass(frozen=True)
class Link:
    """One direction between two ranks: their group, and the other one's global rank."""

    group: dist.ProcessGroup
    peer: int


@dataclass(frozen=True)
class Links:
    """A rank's two neighbours on the ring of stages: the last stage's next is the first. One communicator for both
    directions would let the two stages of a pipeline of two wait for each other, as both send before they receive."""

    previous: Link
    following: Link


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


@dataclass(frozen=True, repr=False)
class Mesh(Layout):
    """A layout, with the groups that the rank talks over; a group of one rank is None."""

    ulysses: dist.ProcessGroup | None = None
    ring: dist.ProcessGroup | None = None
    sequence: dist.ProcessGroup | None = None  # over which tokens are split, ring × ulysses; index is u + U·r
    batch: dist.ProcessGroup | None = None  # over which the batch is split, data × cfg; index is c + C·d
    members: dist.ProcessGroup | None = None  # all ranks of the plan
    peers: Any = None  # memory that the ranks of `sequence` share: HeadRoutes in exchange/head_routes.py
    links: Links | None = None  # to other stages where there are several


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
    Collective: every rank of the world calls it, with the same plan and in the same order. Recordings are kept by mesh,
    so keep one per plan. `groups` are those of earlier meshes, which this one shares."""
    layout = lay_out_plan(plan, rank, speeds)
    groups = groups or Groups(rank, world_size)
    own: dict[str, Any] = {}
    for name, axes in _GROUPED.items():
        for key in _rows(plan, axes):
            group = groups.join(key)
            if rank in key[0]:
                own[name] = group
    links = _build_links(plan, rank, groups)
    if layout is None:
        return None
    peers = groups.memory((layout.sequence_ranks, "")) if plan.sequence > 1 else None
    return Mesh(layout.plan, layout.rank, layout.coordinate, layout.speeds, **own, peers=peers, links=links)


def mesh_groups(plan: ParallelPlan) -> set[GroupKey]:
    """The groups that a plan's mesh has on all of its ranks."""
    return {key for axes in _GROUPED.values() for key in _rows(plan, axes)}.union(_link_groups(plan))


def _build_links(plan: ParallelPlan, rank: int, groups: Groups) -> Links | None:
    """A rank's links in a plan; None where there is one stage, or the rank takes no part. Collective over the world."""
    links: dict[str, Link] = {}
    for key in _link_groups(plan):
        (source, target), group = key[0], groups.join(key)
        if group is not None and rank == source:
            links["out"] = Link(group, target)
        elif group is not None:
            links["in"] = Link(group, source)
    return Links(links["in"], links["out"]) if "in" in links else None


def _rows(plan: ParallelPlan, axes: tuple[str, ...]) -> list[GroupKey]:
    """The sets of ranks that differ in these axes only; none where that is one rank each."""
    array = torch.arange(plan.world_size).reshape(plan.shape)
    rows = array.movedim([AXES.index(axis) for axis in axes], list(range(-len(axes), 0))).flatten(-len(axes))
    return [(tuple(row), "") for row in rows.reshape(-1, rows.shape[-1]).tolist()] if rows.shape[-1] > 1 else []


def _link_groups(plan: ParallelPlan) -> list[GroupKey]:
    """The groups between stages, each of (source, target); none of one stage."""
    return [(link, "link") for row, _ in _rows(plan, ("pipe",)) for link in zip(row, row[1:] + row[:1], strict=True)]


def _coordinate(plan: ParallelPlan, rank: int) -> Mapping[str, int]:
    place = torch.unravel_index(torch.tensor(rank), plan.shape)
    return MappingProxyType({axis: int(index) for axis, index in zip(AXES, place, strict=True)})
