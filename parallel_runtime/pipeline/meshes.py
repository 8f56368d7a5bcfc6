"""The meshes and links that this rank has joined. Groups live as long as the process, so they are made once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from ..config import ParallelPlan
from ..mesh import Mesh, build_mesh, single_rank_mesh
from ..pipefusion.cut import stage_speeds
from ..pipefusion.links import Links, build_links


@dataclass(frozen=True)
class Place:
    """A rank's place in a plan.

    Args:
        links: to other stages where there are several.
        stage_speeds: of all stages, by which they share out the blocks; None where they are alike. The same on every
            rank, or stages would compute a block twice or never.
    """

    mesh: Mesh
    links: Links | None = None
    stage_speeds: tuple[float, ...] | None = None


@dataclass
class Meshes:
    """Places by plan.

    Args:
        device_type, rank, world_size: of this rank.
        speeds: of all ranks, None where they are alike; the same on every rank.
    """

    device_type: str
    rank: int
    world_size: int
    speeds: Sequence[float] | None = None
    _places: dict[tuple[ParallelPlan, bool], Place | None] = field(default_factory=dict)

    def place(self, plan: ParallelPlan, mirrored: bool = False) -> Place | None:
        """This rank's place in a plan, None where it takes no part.

        Collective the first time: every rank of the pool asks for the same plans in the same order.

        Args:
            mirrored: with links between stages that skip connections join.
        """
        # How often the latent is cut changes no group.
        key = (replace(plan, patches=1, warmup_steps=0), mirrored)
        if key not in self._places:
            self._places[key] = self._join(*key)
        return self._places[key]

    def _join(self, plan: ParallelPlan, mirrored: bool) -> Place | None:
        if self.world_size == 1:
            return Place(single_rank_mesh())
        # The ranks of a stage deal their tokens patch by patch, in equal bands; stages have blocks by their speed.
        speeds = self.speeds if plan.pipe == 1 else None
        mesh = build_mesh(plan, self.device_type, self.rank, self.world_size, speeds)
        links = build_links(plan, self.rank, mirrored)
        return Place(mesh, links, stage_speeds(plan, self.speeds)) if mesh is not None else None
