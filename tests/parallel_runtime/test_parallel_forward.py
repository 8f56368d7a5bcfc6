"""One forward on P ranks against the same diffusers transformer, unwrapped, in one process and float32."""

from __future__ import annotations

import logging
import math
from typing import Any

import pytest
import torch

from parallel_runtime.config import ParallelPlan
from parallel_runtime.mesh.mesh import build_mesh
from parallel_runtime.networks.diffusers.flux import FLUX
from parallel_runtime.networks.diffusers.parallel_transformer import ParallelTransformer, parallelize
from parallel_runtime.networks.shares import gather_batch, share_of_batch
from tests.parallel_runtime.flux_forward import build_transformer, forward_arguments, relative_error, run
from tests.ranks import run_ranks

# ((rows, columns), text tokens, batch)
EVEN: list[list[Any]] = [[[4, 6], 12, 1], [[8, 3], 12, 2], [[4, 3], 24, 1]]
UNEVEN: list[list[Any]] = [
    [[5, 5], 7, 1],  # neither divides
    [[4, 6], 7, 2],  # the text does not
    [[5, 7], 12, 1],  # the image does not
    [[3, 7], 1, 3],  # ranks without text
    [[3, 3], 0, 1],  # no text at all
    [[1, 2], 2, 1],  # on more than two ranks, some would have no token at all
]


def run_plans(
    rank: int, world_size: int, heads: list[int], plans: list[dict[str, Any]], cases: list[list[Any]]
) -> dict[str, Any]:
    """Run by `run_ranks`: every case on every plan, the same wrapped weights throughout."""
    outputs = {}
    meshes = []
    for plan in plans:
        degrees = {axis: degree for axis, degree in plan.items() if axis != "speeds"}
        meshes.append(build_mesh(ParallelPlan(**degrees), rank, world_size, plan.get("speeds")))
    for count in heads:
        transformer = None
        for number, mesh in enumerate(meshes):
            if mesh is None:
                continue
            if transformer is None:
                transformer = parallelize(build_transformer(heads=count), FLUX, mesh)
            transformer.set_mesh(mesh)
            for case, given in enumerate(cases):
                outputs[f"{count} {number} {case}"] = run_batch_split(transformer, given)
    return outputs


def run_batch_split(transformer: ParallelTransformer, given: list[Any]) -> torch.Tensor:
    """One forward whose rows are split over the batch axes."""
    image, text, batch = given
    arguments = forward_arguments(image, text, batch)
    start, stop = share_of_batch(batch, transformer.mesh)
    whole = ("img_ids", "txt_ids")
    share = {
        name: value[start:stop] if isinstance(value, torch.Tensor) and name not in whole else value
        for name, value in arguments.items()
    }
    rows = transformer(**share)[0] if start < stop else torch.empty(0, *arguments["hidden_states"].shape[1:])
    return gather_batch(rows, batch, transformer.mesh)


@pytest.mark.long_but_for("4")
@pytest.mark.slow_but_for("2")  # three and four ranks are in the first tier as a family's: test_family_forward.py
@pytest.mark.parametrize(
    ("world_size", "heads", "plans"),
    [
        (2, [4, 3], [{"ulysses": 2}, {"cfg": 2}, {"ring": 2}, {"ulysses": 2, "speeds": [1.0, 0.5]}]),
        (3, [3, 4], [{"ulysses": 3}, {"data": 3}, {"ulysses": 2}, {"ring": 3, "speeds": [0.3, 1.0, 0.3]}]),
        (
            4,
            [4, 6],
            [
                {"ulysses": 4},
                {"cfg": 2, "ulysses": 2},
                {"ulysses": 3},
                {},
                {"data": 2, "cfg": 2},
                {"ring": 2, "ulysses": 2},
                {"cfg": 2, "ring": 2, "speeds": [1.0, 0.5, 1.0, 1.0]},
            ],
        ),
    ],
    ids=["2", "3", "4"],
)
def test_any_plan_gives_the_one_process_result_on_every_rank(world_size, heads, plans):
    cases = EVEN + UNEVEN
    results = run_ranks(world_size, f"{__name__}:run_plans", {"heads": heads, "plans": plans, "cases": cases})
    for count in heads:
        transformer = build_transformer(heads=count)
        expected = [run(transformer, *case) for case in cases]
        for number, plan in enumerate(plans):
            for case, given in enumerate(cases):
                outputs = [result.get(f"{count} {number} {case}") for result in results]
                ranks = math.prod(degree for axis, degree in plan.items() if axis != "speeds")
                assert all(output is None for output in outputs[ranks:])
                assert relative_error(outputs[0], expected[case]) < 1e-5, (count, plan, given)
                assert all(torch.equal(output, outputs[0]) for output in outputs[1:ranks]), (count, plan, given)


def run_compiled(rank: int, world_size: int, cases: list[list[Any]]) -> dict[str, Any]:
    """Run by `run_ranks`: compiled blocks; outputs, and the number of graphs after every case."""
    from torch._dynamo.utils import counters

    logging.getLogger("torch._dynamo").setLevel(logging.ERROR)
    mesh = build_mesh(ParallelPlan(ulysses=world_size), rank, world_size)
    assert mesh is not None
    transformer = parallelize(build_transformer(layers=3), FLUX, mesh, compile=True)
    results: dict[str, Any] = {"graphs": []}
    for number, (image, text, batch) in enumerate(cases):
        results[str(number)] = run(transformer, image, text, batch)
        results["graphs"].append(counters["stats"]["unique_graphs"])
    return results


@pytest.mark.long
def test_compiled_blocks_give_the_same_result_and_new_sizes_soon_need_no_new_graph():
    learnt = [EVEN[0], [[4, 4], 6, 1], [[5, 5], 8, 1]]  # a size, another, and one that does not divide
    more = [[[6, 6], 20, 1], [[5, 7], 10, 1], [[7, 7], 14, 1], [[9, 5], 4, 1], [[2, 6], 16, 1]]
    cases = learnt + more
    results = run_ranks(2, f"{__name__}:run_compiled", {"cases": cases})
    transformer = build_transformer(layers=3)
    for result in results:
        for number, case in enumerate(cases):
            assert relative_error(result[str(number)], run(transformer, *case)) < 1e-5, case
        # One per kind of block, however many blocks: halves of joint tensors, which blocks hand on, are as others.
        assert result["graphs"][0] == 2
        assert result["graphs"][len(learnt) - 1] == result["graphs"][-1]
