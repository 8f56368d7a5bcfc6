"""Where a rank stands in each plan, and the groups and links that it has joined for it."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch.distributed as dist

from ..config import ParallelPlan
from ..mesh.groups import GroupMemory, Groups
from ..mesh.links import build_links, link_groups
from ..mesh.mesh import Layout, Mesh, build_mesh, lay_out_plan, mesh_groups, single_rank_mesh

KEPT = 16
"""Plans whose groups are kept, the last ones that were asked for: the same on every rank, as each counts all requests.
Another one costs a first step its communicators."""


class Meshes:
    """Layouts and meshes by plan.

    Args:
        speeds: of all ranks, None where they are alike; the same on every rank.
        leave: lets go of what was recorded over a mesh, before its groups are destroyed.
        share: see Groups.
    """

    def __init__(
        self,
        rank: int,
        world_size: int,
        speeds: Sequence[float] | None = None,
        leave: Callable[[Mesh], None] = lambda mesh: None,
        share: Callable[[dist.ProcessGroup], GroupMemory] | None = None,
    ):
        self.speeds = speeds
        self.groups = Groups(rank, world_size, share)
        self._rank, self._world_size, self._leave = rank, world_size, leave
        self._joined: OrderedDict[ParallelPlan, Mesh | None] = OrderedDict()
        # One mesh for good: what the first rank recorded by itself is kept by it.
        self._alone = single_rank_mesh()

    def place(self, plan: ParallelPlan) -> Layout | None:
        """This rank's place in a plan, None where it takes no part. Pure."""
        return lay_out_plan(plan, self._rank, self._token_speeds(plan))

    def join(self, plan: ParallelPlan) -> Mesh | None:
        """This rank's mesh of a plan, with its links, None where this rank takes no part.

        Collective over the world where they are new: every rank joins the same plans in the same order, which only
        RUN can promise.
        """
        if plan.world_size == 1:
            return self._alone if self._rank == 0 else None
        # How often the latent is cut changes no group.
        key = replace(plan, patches=1, warmup_steps=0)
        if key not in self._joined:
            mesh = build_mesh(key, self._rank, self._world_size, self._token_speeds(key), self.groups)
            links = build_links(key, self._rank, self.groups)
            self._joined[key] = None if mesh is None else replace(mesh, links=links)
        self._joined.move_to_end(key)
        if len(self._joined) > KEPT:
            _, oldest = self._joined.popitem(last=False)
            if oldest is not None:
                self._leave(oldest)
            self.groups.keep({group for plan in self._joined for group in (*mesh_groups(plan), *link_groups(plan))})
        return self._joined[key]

    def _token_speeds(self, plan: ParallelPlan) -> Sequence[float] | None:
        # The ranks of a stage split their tokens patch by patch, in equal bands.
        return self.speeds if plan.pipe == 1 else None
