"""Where a rank stands in each plan, and the groups and links that it has joined for it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from ..config import ParallelPlan
from ..groups import Groups
from ..mesh import Layout, Mesh, build_mesh, lay_out_plan, single_rank_mesh
from ..pipefusion.cut import stage_speeds
from ..pipefusion.links import Links, build_links


@dataclass(frozen=True)
class Place:
    """A rank's place in a plan, before any rank has joined a group: what can be known in PREPARE.

    Args:
        stage_speeds: of all stages, by which they share out the blocks; None where they are alike. The same on every
            rank, or stages would compute a block twice or never.
        mirrored: stages are also linked to their mirror image, as skip connections join them.
    """

    layout: Layout
    stage_speeds: tuple[float, ...] | None = None
    mirrored: bool = False


@dataclass(frozen=True)
class Joined:
    """What a rank talks over in a plan.

    Args:
        links: to other stages where there are several.
    """

    mesh: Mesh
    links: Links | None = None


@dataclass
class Meshes:
    """Places, meshes and links by plan.

    Args:
        rank, world_size: of this rank.
        speeds: of all ranks, None where they are alike; the same on every rank.
    """

    rank: int
    world_size: int
    speeds: Sequence[float] | None = None
    _groups: Groups = field(init=False)
    _joined: dict[tuple[ParallelPlan, bool], Joined | None] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._groups = Groups(self.rank, self.world_size)

    def place(self, plan: ParallelPlan, mirrored: bool = False) -> Place | None:
        """This rank's place in a plan, None where it takes no part. Pure.

        Args:
            mirrored: with links between stages that skip connections join.
        """
        layout = lay_out_plan(plan, self.rank, self.world_size, self._token_speeds(plan))
        return None if layout is None else Place(layout, stage_speeds(plan, self.speeds), mirrored)

    def join(self, plan: ParallelPlan, mirrored: bool = False) -> Joined | None:
        """The groups of a plan, None where this rank takes no part.

        Collective over the world where they are new: every rank joins the same plans in the same order, which only
        RUN can promise.
        """
        # How often the latent is cut changes no group.
        key = (replace(plan, patches=1, warmup_steps=0), mirrored)
        if key not in self._joined:
            self._joined[key] = self._join(*key)
        return self._joined[key]

    def _join(self, plan: ParallelPlan, mirrored: bool) -> Joined | None:
        if self.world_size == 1:
            return Joined(single_rank_mesh())
        mesh = build_mesh(plan, self.rank, self.world_size, self._token_speeds(plan), self._groups)
        links = build_links(plan, self.rank, mirrored, self._groups)
        return Joined(mesh, links) if mesh is not None else None

    def _token_speeds(self, plan: ParallelPlan) -> Sequence[float] | None:
        # The ranks of a stage deal their tokens patch by patch, in equal bands; stages have blocks by their speed.
        return self.speeds if plan.pipe == 1 else None
