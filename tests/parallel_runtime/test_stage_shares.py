"""What a stage gets and keeps: blocks by their number, keys and values as predicted; what has no room is refused."""

from __future__ import annotations

import pytest
import torch

from benchmarks.lone_stage import stage_of
from parallel_runtime.engine.opened import DiffusersFamily
from parallel_runtime.mesh.mesh import single_rank_mesh
from parallel_runtime.planning.cut import assign_blocks, kept_bytes
from parallel_runtime.requests.facts import Seen
from tests.families import STAGED, build, facts_of
from tests.parallel_runtime.engine_run import measure_kept
from tests.parallel_runtime.staged_families import run_family
from tests.ranks import run_ranks
from tests.tiny_flux import tiny_config, write_diffusers_folder
from tests.tiny_model import find_by_name


def counts(stages: tuple[tuple[int, int], ...]) -> list[int]:
    return [stop - start for start, stop in stages]


def test_blocks_are_assigned_evenly_as_far_as_memory_allows():
    assert counts(assign_blocks((1,) * 30, 2)) == [15, 15]
    assert counts(assign_blocks((1,) * 32, 3)) == [10, 11, 11]
    assert counts(assign_blocks((3,) * 10 + (1,) * 20, 2, most=26)) == [8, 22]  # 24 and 26 parameters
    assert counts(assign_blocks((3,) * 10 + (1,) * 20, 2, most=20)) == [8, 22]  # nothing fits; the largest is smallest


@pytest.mark.slow
def test_unlike_ranks_have_as_many_blocks_each_and_one_without_room_refuses(tmp_path):
    path = write_diffusers_folder(tmp_path / "tiny", tiny_config(num_layers=3, num_single_layers=3))
    first, second = run_ranks(
        2, "tests.parallel_runtime.engine_run:run_unlike_engine", {"path": str(path), "speeds": [1.0, 0.5]}
    )
    assert (first["owned"], second["owned"]) == ([0, 3], [3, 6])
    assert "2 stages of 3 blocks" in first["says"]
    assert first["told speeds"] == []  # a later pool measures its own
    # Rank 1 has no room: it says so before anything runs, and the next request runs.
    assert "refused" not in first
    for words in ("A picture of 25 tokens", "keys and values", "activations", "(worker 1)", "smaller picture"):
        assert words in second["refused"]
    assert torch.equal(first["afterwards"], first["sampled"])


@pytest.mark.long_but_for("Wan", "SD3.5 medium")
@pytest.mark.slow
@pytest.mark.parametrize("name", STAGED)
def test_the_predicted_keys_and_values_are_what_a_stage_keeps_or_a_little_more(name):
    """Of text where a layer is about the picture alone they reckon with too much."""
    family, mesh = STAGED[name], single_rank_mesh()
    spec, module = find_by_name(family.spec), build(family)
    facts = facts_of(module, spec)
    shapes = Seen(tuple(family.call["context"].shape), (tuple(family.call["x"].shape),))
    request = DiffusersFamily(spec, family.config).describe(shapes, batch=1, steps=4)
    predicted = kept_bytes(facts, (0, facts.blocks), len(family.call["x"]) * (request.tokens + request.text_tokens))
    kept = measure_kept(lambda: run_family(family, stage_of(module, spec, mesh)))
    assert 0 < kept <= predicted < 1.2 * kept
