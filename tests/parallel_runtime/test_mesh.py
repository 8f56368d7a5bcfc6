"""The mesh: who talks to whom. The oracle is an array of ranks in the shape of the plan."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from parallel_runtime.config import AXES, ParallelPlan
from parallel_runtime.mesh.mesh import build_mesh, single_rank_mesh
from parallel_runtime.mesh.speeds import compare_devices, gather_from_ranks, relative_speeds
from tests.ranks import run_ranks

PLANS = [
    {"ulysses": 8},
    {"data": 2, "cfg": 2, "ulysses": 2},
    {"cfg": 2, "ring": 2, "ulysses": 2},
    {"data": 2, "pipe": 2, "ring": 2},
    {"cfg": 2, "ulysses": 3},
    {"ring": 2, "ulysses": 2},
    {"data": 3},
    {"data": 1},
]
GROUPS = {"ulysses": ("ulysses",), "ring": ("ring",), "sequence": ("ring", "ulysses"), "batch": ("data", "cfg")}


def describe_meshes(rank: int, world_size: int) -> dict[str, Any]:
    """Run by `run_ranks`: what this rank sees of every plan's mesh, as group members and as sums over the groups."""
    found = []
    for degrees in PLANS:
        mesh = build_mesh(ParallelPlan(**degrees), rank, world_size)
        if mesh is None:
            found.append(None)
            continue
        groups = {name: getattr(mesh, name) for name in GROUPS}
        members = {name: group and dist.get_process_group_ranks(group) for name, group in groups.items()}
        sums = {}
        for name, group in groups.items():
            value = torch.tensor(rank)
            if group is not None:
                dist.all_reduce(value, group=group)
            sums[name] = int(value)
        indices = [mesh.sequence_index, mesh.batch_index]
        found.append({"coordinate": dict(mesh.coordinate), "members": members, "sums": sums, "indices": indices})
    return {"meshes": found}


def test_groups_are_the_rows_of_the_rank_array_and_absent_where_they_are_one_rank():
    results = run_ranks(8, f"{__name__}:describe_meshes")
    for number, degrees in enumerate(PLANS):
        plan = ParallelPlan(**degrees)
        array = torch.arange(plan.world_size).reshape(plan.shape)
        for rank in range(8):
            seen = results[rank]["meshes"][number]
            if rank >= plan.world_size:
                assert seen is None, (degrees, rank)
                continue
            coordinate = [int(index) for index in (array == rank).nonzero()[0]]
            assert seen["coordinate"] == dict(zip(AXES, coordinate, strict=True))
            for name, axes in GROUPS.items():
                row = array[tuple(slice(None) if axis in axes else c for axis, c in zip(AXES, coordinate, strict=True))]
                members = row.flatten().tolist()
                assert seen["members"][name] == (members if len(members) > 1 else None), (degrees, rank, name)
                assert seen["sums"][name] == sum(members)
                if name in ("sequence", "batch"):
                    assert seen["indices"][("sequence", "batch").index(name)] == members.index(rank)


def test_one_rank_needs_no_process_group():
    assert not dist.is_initialized()
    for mesh in (single_rank_mesh(), build_mesh(ParallelPlan(), 0, 4)):
        assert mesh is not None
        assert mesh.plan == ParallelPlan()
        assert (mesh.ulysses, mesh.ring, mesh.sequence, mesh.batch) == (None,) * 4
        assert (mesh.sequence_index, mesh.batch_index) == (0, 0)
    assert build_mesh(ParallelPlan(), 1, 4) is None


def describe_speeds(rank: int, world_size: int) -> dict[str, Any]:
    """Run by `run_ranks`: the speeds that this rank's mesh holds, and whether CPU ranks measure any."""
    plans = ParallelPlan(cfg=2, ulysses=2), ParallelPlan(ring=2, ulysses=2), ParallelPlan(data=4)
    meshes = [build_mesh(plan, rank, world_size, [1.0, 0.5, 0.25, 0.25]) for plan in plans]
    alike = build_mesh(plans[1], rank, world_size)
    assert alike is not None
    assert alike.speeds is None
    return {
        "speeds": [mesh and mesh.speeds for mesh in meshes],
        "measured": compare_devices(torch.device("cpu"), world_size),
        "gathered": gather_from_ranks([float(rank)], world_size),
    }


def test_a_mesh_knows_the_speeds_of_its_own_sequence_group_where_they_are_unlike():
    results = run_ranks(4, f"{__name__}:describe_speeds")
    whole = [1.0, 0.5, 0.25, 0.25]
    for rank, result in enumerate(results):
        assert result["speeds"] == [[1.0, 0.5] if rank < 2 else None, whole, None]
        assert result["measured"] == [False, None]
        assert result["gathered"] == [[0.0], [1.0], [2.0], [3.0]]


def test_speeds_are_told_in_steps_of_the_fastest_and_not_where_they_are_alike():
    assert relative_speeds([50.0, 100.0, 101.0]) == [0.5, 1.0, 1.0]
    assert relative_speeds([99.0, 100.0, 101.0]) is None
    assert relative_speeds([0.001, 100.0]) == [0.05, 1.0]
