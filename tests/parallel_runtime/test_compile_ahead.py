"""Compiling beside the pictures: plain forwards first, graphs by another process, a swap that finds them on disk."""

from __future__ import annotations

import sys
import time
from typing import Any

import pytest
import torch

from parallel_runtime.acceleration.compile_ahead import CompileAhead, Progress
from parallel_runtime.acceleration.swap import Graphs
from parallel_runtime.config import ParallelPlan
from parallel_runtime.engine.structure import COMPILER
from parallel_runtime.mesh.mesh import build_mesh, single_rank_mesh
from parallel_runtime.networks.diffusers.flux import FLUX
from parallel_runtime.networks.parallel_transformer import parallelize
from tests.parallel_runtime.flux_forward import build_transformer, forward_arguments, relative_error
from tests.ranks import run_ranks

SIZE = (3, 5), 4
"""Uneven shares for two ranks: what a graph then reads beside its arguments must be found on disk, too."""


def build_one_block() -> Any:
    """The fewest kernels to compile that a picture goes through."""
    return build_transformer(layers=1, double=0)


def run_until_swapped(rank: int, world_size: int) -> dict[str, Any]:
    torch.set_grad_enabled(False)
    torch.set_num_threads(2)  # as a pool that has grown does; the environment says 1
    mesh = build_mesh(ParallelPlan(ulysses=world_size), rank, world_size)
    assert mesh is not None
    transformer = parallelize(build_one_block(), FLUX, mesh, compile=True, ahead=COMPILER)
    first = transformer(**forward_arguments(*SIZE))[0]
    found: dict[str, Any] = {"first": first, "compiler at the first": "torch._inductor.codegen" in sys.modules}
    deadline = time.monotonic() + 780
    while transformer._compilation.compiled is None and time.monotonic() < deadline:
        time.sleep(0.2)
        imported, started = list(sys.modules), time.perf_counter()
        swapped = transformer(**forward_arguments(*SIZE))[0]
        found |= {"swapped": swapped, "swap seconds": time.perf_counter() - started}
        found["imported"] = [name for name in list(sys.modules) if name.startswith("torch.") and name not in imported]
    graphs = Graphs.so_far()
    found |= {"found": graphs.found, "lowered": graphs.lowered, "made": graphs.made}
    return found


@pytest.mark.slow
def test_the_swap_finds_all_graphs_on_disk_and_changes_nothing_but_rounding(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    expected = build_one_block()(**forward_arguments(*SIZE))[0]
    for found in run_ranks(2, f"{__name__}:run_until_swapped"):
        assert not found["compiler at the first"]
        assert relative_error(found["first"], expected) < 1e-5
        assert relative_error(found["swapped"], expected) < 1e-5
        assert (found["found"] + found["lowered"], found["made"]) == (1, 0)
        assert len(found["imported"]) < 20, found["imported"]
        print(f"swap: {found['swap seconds']:.1f} s, imports of torch: {len(found['imported'])}")


class PlannedCompiler:
    """A compiler whose progress the test sets."""

    def __init__(self) -> None:
        self.told: list[tuple[int, Any]] = []
        self.now: dict[int, Progress] = {}

    def watch(self) -> None:
        self.watched = True

    def submit(self, number: int, mesh: Any, args: Any, kwargs: Any) -> None:
        assert self.watched
        self.told.append((number, args[0].shape))

    def progress(self, number: int) -> Progress:
        return self.now.get(number, Progress.WORKING)

    def close(self) -> None:
        self.told.clear()


def runs_compiled(ahead: CompileAhead, tokens: int) -> bool:
    return ahead.run(single_rank_mesh(), (torch.zeros(1, tokens),), {"return_dict": False}, lambda compiled: compiled)


def test_a_kind_of_call_runs_plainly_until_its_graphs_are_made_and_for_good_where_they_cannot_be():
    compiler = PlannedCompiler()
    ahead = CompileAhead(compiler)
    assert not any(runs_compiled(ahead, tokens) for tokens in (4, 4, 6, 4))
    assert compiler.told == [(1, (1, 4)), (2, (1, 6))]
    compiler.now = {1: Progress.DONE, 2: Progress.FAILED}
    assert [runs_compiled(ahead, tokens) for tokens in (4, 6, 4)] == [True, False, True]
    compiler.now = {1: Progress.WORKING, 2: Progress.DONE}  # nobody is asked again
    assert [runs_compiled(ahead, tokens) for tokens in (4, 6)] == [True, False]


def test_ranks_that_know_different_things_begin_anew_together():
    compiler = PlannedCompiler()
    ahead = CompileAhead(compiler)
    ranks = single_rank_mesh().sequence_ranks
    ahead.go_on(ranks, 3)
    runs_compiled(ahead, 4)
    compiler.now = {1: Progress.DONE}
    ahead.go_on(ranks, 3)
    assert ahead.history(ranks) == 3
    assert runs_compiled(ahead, 4)
    ahead.go_on(ranks, 4)  # another rank had lost what it knew
    assert not runs_compiled(ahead, 4)
    assert [number for number, _ in compiler.told] == [1, 2]
    ahead.give_up()
    assert ahead.history(ranks) == 0
    assert not runs_compiled(ahead, 4)


def test_graphs_that_are_made_outlive_an_unload_and_those_under_way_are_begun_anew():
    compiler = PlannedCompiler()
    ahead = CompileAhead(compiler)
    runs_compiled(ahead, 4)
    compiler.now = {1: Progress.DONE}
    assert runs_compiled(ahead, 4)
    ahead.give_up()
    assert runs_compiled(ahead, 4)
    assert compiler.told == []
    runs_compiled(ahead, 6)
    ahead.give_up()  # while another size is under way
    assert not runs_compiled(ahead, 6)
    assert not runs_compiled(ahead, 4)
    assert [shape for _, shape in compiler.told] == [(1, 6), (1, 4)]
