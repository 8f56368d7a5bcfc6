"""Modulation layers computed in shares: the same result as one process, each rank with its own layers only."""

from __future__ import annotations

import logging
from collections import Counter
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from parallel_runtime.config import ParallelPlan
from parallel_runtime.mesh.mesh import build_mesh, single_rank_mesh
from parallel_runtime.networks.diffusers.flux import FLUX
from parallel_runtime.networks.diffusers.parallel_transformer import parallelize
from parallel_runtime.networks.marked_blocks import find_modules
from parallel_runtime.networks.modulation import assign
from tests.parallel_runtime.flux_forward import build_transformer, relative_error, run
from tests.ranks import run_ranks

LAYERS = 5
NAMES = [f"{cut.path}.*.{layer}" for cut in FLUX.cut for layers in cut.modulations.values() for layer in layers]
PATHS = sorted(find_modules(build_transformer(layers=LAYERS), NAMES))
CASES: list[list[Any]] = [[[4, 6], 12, 1], [[5, 5], 7, 2]]


class ReadWeights(TorchDispatchMode):
    """Counts which of the named layers' weights are multiplied with."""

    def __init__(self, layers: dict[str, Any]):
        super().__init__()
        self._paths = {layer.weight.data_ptr(): path for path, layer in layers.items()}
        self.read: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (torch.ops.aten.addmm.default, torch.ops.aten.linear.default):
            for tensor in args:
                if isinstance(tensor, torch.Tensor) and tensor.data_ptr() in self._paths:
                    self.read[self._paths[tensor.data_ptr()]] += 1
        return func(*args, **(kwargs or {}))


def run_eager(rank: int, world_size: int, plans: list[dict[str, int]]) -> dict[str, Any]:
    """Run by `run_ranks`: every case on every plan, and whose weights were read in each."""
    transformer = build_transformer(layers=LAYERS)
    layers = find_modules(transformer, NAMES)
    weights = {name: tensor.data_ptr() for name, tensor in transformer.state_dict().items()}
    wrapped = parallelize(transformer, FLUX, single_rank_mesh())
    results: dict[str, Any] = {}
    for number, plan in enumerate(plans):
        mesh = build_mesh(ParallelPlan(**plan), rank, world_size)
        if mesh is None:
            continue
        wrapped.set_mesh(mesh)
        for case, arguments in enumerate(CASES):
            with ReadWeights(layers) as weights_read:
                results[f"output {number} {case}"] = run(wrapped, *arguments)
            results[f"read {number} {case}"] = dict(weights_read.read)
        assert {name: tensor.data_ptr() for name, tensor in transformer.state_dict().items()} == weights
    return results


@pytest.mark.slow
def test_each_rank_computes_its_own_layers_only_and_the_result_is_that_of_one_process():
    # Fifteen layers of two sizes are uneven shares for all of these plans, among them a group of one and two of two.
    plans: list[dict[str, int]] = [{"ulysses": 4}, {"ulysses": 3}, {"ring": 2, "ulysses": 2}, {}]
    plans += [{"cfg": 2, "ulysses": 2}, {"ulysses": 2}]
    results = run_ranks(4, f"{__name__}:run_eager", {"plans": plans})
    transformer = build_transformer(layers=LAYERS)
    for case, arguments in enumerate(CASES):
        expected = run(transformer, *arguments)
        for number, plan in enumerate(plans):
            sequence = ParallelPlan(**plan).sequence
            on = [result for result in results if f"output {number} {case}" in result]
            assert all(relative_error(result[f"output {number} {case}"], expected) < 1e-5 for result in on), plan
            reads = [result[f"read {number} {case}"] for result in on]
            for first in range(0, len(reads), sequence):
                read = sum((Counter(own) for own in reads[first : first + sequence]), Counter())
                assert read == Counter(PATHS), plan  # each layer once in a group
                assert all(reads[first : first + sequence]), plan  # and nobody without any


def run_compiled(rank: int, world_size: int, plans: list[dict[str, int]]) -> dict[str, Any]:
    """Run by `run_ranks`: the second case on every plan in turn, with the number of graphs after each."""
    from torch._dynamo.utils import counters

    logging.getLogger("torch._dynamo").setLevel(logging.ERROR)
    meshes = [build_mesh(ParallelPlan(**plan), rank, world_size) for plan in plans]
    transformer = parallelize(build_transformer(layers=LAYERS), FLUX, single_rank_mesh(), compile=True)
    results: dict[str, Any] = {"graphs": []}
    for number, mesh in enumerate(meshes):
        if mesh is not None:
            transformer.set_mesh(mesh)
            results[f"output {number}"] = run(transformer, *CASES[1])
            results["graphs"].append(counters["stats"]["unique_graphs"])
    return results


@pytest.mark.long
def test_compiled_blocks_share_their_graphs_and_a_mesh_of_one_rank_needs_one_more_per_kind_of_block():
    plans: list[dict[str, int]] = [{"ulysses": 2}, {}, {"ulysses": 2}]
    results = run_ranks(2, f"{__name__}:run_compiled", {"plans": plans})
    expected = run(build_transformer(layers=LAYERS), *CASES[1])
    for rank, result in enumerate(results):
        outputs = [result[f"output {number}"] for number in range(len(plans)) if f"output {number}" in result]
        assert len(outputs) == (3 if rank == 0 else 2)
        assert all(relative_error(output, expected) < 1e-5 for output in outputs)
        first, last = result["graphs"][0], result["graphs"][-1]
        # One per kind of block, also where diffusers' single blocks return views: what `cut_blocks` hands to the next
        # block is made anew.
        assert first == 2
        assert last <= (2 * first if rank == 0 else first)


@settings(deadline=None)
@given(st.lists(st.integers(1, 50), max_size=20), st.integers(1, 8))
def test_layers_are_assigned_once_and_no_rank_gets_more_than_one_layer_beyond_its_share(sizes, ranks):
    assigned = assign(sizes, ranks)
    assert len(assigned) == ranks
    assert sorted(index for own in assigned for index in own) == list(range(len(sizes)))
    loads = [sum(sizes[index] for index in own) for own in assigned]
    assert max(loads) - min(loads) <= max(sizes, default=0)
    assert max(loads) <= sum(sizes) / ranks + (1 - 1 / ranks) * max(sizes, default=0)


@pytest.mark.parametrize("ranks", [2, 3, 4, 8])
def test_flux_1_is_assigned_so_that_no_rank_has_a_sixteenth_more_than_its_share(ranks):
    sizes = [18432] * 38 + [9216] * 38
    most = max(sum(sizes[index] for index in own) for own in assign(sizes, ranks))
    assert most < (1 + 1 / 16) * sum(sizes) / ranks
