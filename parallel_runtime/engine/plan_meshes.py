"""Where a rank stands in each plan, and the groups and links that it has joined for it."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import torch.distributed as dist

from ..config import ParallelPlan
from ..mesh.groups import GroupKey, GroupMemory, Groups
from ..mesh.links import build_links, link_groups
from ..mesh.mesh import Layout, Mesh, build_mesh, lay_out_plan, mesh_groups, single_rank_mesh

KEPT = 16
"""Plans whose groups are kept, the last ones that were asked for: the same on every rank, as each counts all requests.
Another one costs a first step its communicators."""


@dataclass
class Meshes:
    """Layouts and meshes by plan.

    Args:
        rank, world_size: of this rank.
        speeds: of all ranks, None where they are alike; the same on every rank.
        leave: lets go of what was recorded over a mesh, before its groups are destroyed.
        share: see Groups.
    """

    rank: int
    world_size: int
    speeds: Sequence[float] | None = None
    leave: Callable[[Mesh], None] = lambda mesh: None
    share: Callable[[dist.ProcessGroup], GroupMemory] | None = None
    _groups: Groups = field(init=False)
    _joined: OrderedDict[ParallelPlan, Mesh | None] = field(default_factory=OrderedDict)
    # One mesh for good: what the first rank recorded by itself is kept by it.
    _alone: Mesh = field(default_factory=single_rank_mesh)

    def __post_init__(self) -> None:
        self._groups = Groups(self.rank, self.world_size, self.share)

    def place(self, plan: ParallelPlan) -> Layout | None:
        """This rank's place in a plan, None where it takes no part. Pure."""
        return lay_out_plan(plan, self.rank, self.world_size, self._token_speeds(plan))

    def join(self, plan: ParallelPlan) -> Mesh | None:
        """This rank's mesh of a plan, with its links, None where this rank takes no part.

        Collective over the world where they are new: every rank joins the same plans in the same order, which only
        RUN can promise.
        """
        if plan.world_size == 1:
            return self._alone if self.rank == 0 else None
        # How often the latent is cut changes no group.
        key = replace(plan, patches=1, warmup_steps=0)
        if key not in self._joined:
            self._joined[key] = self._join(key)
        self._joined.move_to_end(key)
        if len(self._joined) > KEPT:
            self._leave_oldest()
        return self._joined[key]

    def free_memory(self) -> None:
        """Let the memory go that the ranks of groups share; every rank of the pool does so in the same request."""
        self._groups.free_memory()

    def _leave_oldest(self) -> None:
        _, oldest = self._joined.popitem(last=False)
        if oldest is not None:
            self.leave(oldest)
        used: set[GroupKey] = set()
        for plan in self._joined:
            used |= {*mesh_groups(plan), *link_groups(plan)}
        self._groups.keep(used)

    def _join(self, plan: ParallelPlan) -> Mesh | None:
        mesh = build_mesh(plan, self.rank, self.world_size, self._token_speeds(plan), self._groups)
        links = build_links(plan, self.rank, self._groups)
        return None if mesh is None else replace(mesh, links=links)

    def _token_speeds(self, plan: ParallelPlan) -> Sequence[float] | None:
        # The ranks of a stage split their tokens patch by patch, in equal bands.
        return self.speeds if plan.pipe == 1 else None
