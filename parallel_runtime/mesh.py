"""The mesh of one plan: which rank works on which part, and the process groups its collectives run over.

A *part* of the work is addressed by one coordinate per mesh axis (data, cfg, pipe, ring, ulysses), ulysses innermost.
Two pairs of axes act as one: ring × ulysses split the token sequence, data × cfg split the batch.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from .config import AXES, ParallelPlan
from .errors import ConfigurationError


@dataclass(frozen=True)
class Mesh:
    """One rank's place in the plan, with the groups it talks over; a group of one rank is None.

    Args:
        plan: degrees of every axis.
        rank: global rank of this process.
        coordinate: this rank's index on each axis of AXES.
        ulysses, ring: groups along that axis.
        sequence: group over which the token sequence is split, ring × ulysses; index is u + U·r.
        batch: group over which the batch is split, data × cfg; index is c + C·d.
        speeds: of the ranks of `sequence`, in the order of its indices, where they are unlike: they then hold tokens in
            that proportion. The same numbers on all of them.
    """

    plan: ParallelPlan
    rank: int
    coordinate: Mapping[str, int]
    ulysses: dist.ProcessGroup | None = field(default=None, repr=False)
    ring: dist.ProcessGroup | None = field(default=None, repr=False)
    sequence: dist.ProcessGroup | None = field(default=None, repr=False)
    batch: dist.ProcessGroup | None = field(default=None, repr=False)
    speeds: tuple[float, ...] | None = None

    @property
    def sequence_index(self) -> int:
        """Which share of the tokens is this rank's, below plan.sequence."""
        return self.coordinate["ring"] * self.plan.ulysses + self.coordinate["ulysses"]

    @property
    def batch_index(self) -> int:
        """Which share of the batch is this rank's, below plan.batch."""
        return self.coordinate["data"] * self.plan.cfg + self.coordinate["cfg"]


def single_rank_mesh() -> Mesh:
    """Return the mesh of one rank; needs no torch.distributed."""
    return Mesh(ParallelPlan(), rank=0, coordinate=_coordinate(ParallelPlan(), 0))


def build_mesh(
    plan: ParallelPlan, device_type: str, rank: int, world_size: int, speeds: Sequence[float] | None = None
) -> Mesh | None:
    """Build the mesh of `plan` over the first plan.world_size ranks of the world.

    Collective: every rank of the world calls it, also those that take no part, with the same plan and in the same
    order, because process groups are numbered in the order in which they are made. Groups live as long as the
    process, so keep one mesh per plan instead of building one per request.

    Args:
        plan: the same on every rank.
        device_type: "cuda" (NCCL) or "cpu" (gloo).
        rank, world_size: of the default process group; not needed to exist when the plan has one rank.
        speeds: of every rank of the world, see speed.py; None when they are alike.

    Returns:
        This rank's mesh, or None where the rank takes no part.

    Raises:
        ConfigurationError: the plan needs more ranks than there are, on every rank alike.
    """
    if plan.world_size > world_size:
        raise ConfigurationError(
            f"The plan ({plan}) needs {plan.world_size} ranks, and {world_size} are running.",
            "Lower a degree, set it to auto, or add devices.",
        )
    if plan.world_size == 1:
        return single_rank_mesh() if rank == 0 else None
    axes = _groups(device_type, dict(zip(AXES, plan.shape, strict=True)), rank)
    joined = {"batch": plan.batch, "pipe": plan.pipe, "sequence": plan.sequence}
    if _is_product(plan.data, plan.cfg) or _is_product(plan.ring, plan.ulysses):
        # A second mesh with the pairs already joined: the same public call on every torch version, where flattening
        # axes of an existing mesh is private and has changed.
        groups = _groups(device_type, joined, rank)
    else:
        groups = {"batch": axes["data"] or axes["cfg"], "sequence": axes["ring"] or axes["ulysses"]}
    if rank >= plan.world_size:
        return None
    mesh = Mesh(
        plan,
        rank,
        _coordinate(plan, rank),
        ulysses=axes["ulysses"],
        ring=axes["ring"],
        sequence=groups["sequence"],
        batch=groups["batch"],
    )
    return mesh if speeds is None else replace(mesh, speeds=_own_speeds(mesh, speeds))


def _own_speeds(mesh: Mesh, speeds: Sequence[float]) -> tuple[float, ...] | None:
    """Return the speeds of the mesh's sequence group, whose ranks are neighbours; None when they are alike."""
    first = mesh.rank - mesh.sequence_index
    own = tuple(speeds[first : first + mesh.plan.sequence])
    return own if len(set(own)) > 1 else None


def _is_product(outer: int, inner: int) -> bool:
    return outer > 1 and inner > 1


def _groups(device_type: str, degrees: dict[str, int], rank: int) -> dict[str, dist.ProcessGroup | None]:
    """Return this rank's group along every axis; None for axes of one rank, and for ranks outside."""
    active = {axis: degree for axis, degree in degrees.items() if degree > 1}
    ranks = torch.arange(math.prod(active.values())).reshape(tuple(active.values()))
    # Ranks outside take part in the making, or the group counters of the ranks part ways.
    device_mesh = DeviceMesh(device_type, ranks, mesh_dim_names=tuple(active))
    inside = rank < ranks.numel()
    return {axis: device_mesh.get_group(axis) if inside and axis in active else None for axis in degrees}


def _coordinate(plan: ParallelPlan, rank: int) -> Mapping[str, int]:
    coordinate = {}
    for axis, degree in zip(reversed(AXES), reversed(plan.shape), strict=True):
        rank, coordinate[axis] = divmod(rank, degree)
    return MappingProxyType({axis: coordinate[axis] for axis in AXES})
