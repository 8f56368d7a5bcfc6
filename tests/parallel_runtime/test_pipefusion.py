"""Stages over patches give what one process gives that follows the same schedule, for every mesh of up to 8 ranks."""

from __future__ import annotations

import itertools
import math
import random
from typing import Any

import pytest
import torch

from parallel_runtime.networks.diffusers.parallel_transformer import ParallelTransformer
from parallel_runtime.pipefusion.runner import Outbox
from parallel_runtime.requests.control import StopVotes
from parallel_runtime.sampling.samplers import SUPPORTED
from tests.families import STAGED
from tests.parallel_runtime.flux_forward import relative_error
from tests.parallel_runtime.pipefusion_emulator import emulate
from tests.parallel_runtime.staged_families import run_alone
from tests.parallel_runtime.staged_run import make_inputs, sample_request, whole_transformer
from tests.ranks import run_ranks


def case(name: str, latent: tuple[int, int] = (12, 6), steps: int = 4, **more: Any) -> dict[str, Any]:
    plan = {axis: more.pop(axis) for axis in ("data", "cfg", "pipe", "ring", "ulysses") if axis in more}
    plan |= {"patches": more.pop("patches", 2), "warmup_steps": more.pop("warmup", 1)}
    return {"name": name, "plan": plan, "latent": latent, "steps": steps, **more}


CASES = {
    2: [
        case("two stages", pipe=2),
        case("four patches", pipe=2, patches=4),
        case("patches that do not divide", pipe=2, patches=4, latent=(14, 5)),
        case("batch of two", pipe=2, batch=2),
        case("cfg on one pipeline", pipe=2, texts=[5, 3]),
        case("warm-up of two", pipe=2, patches=3, warmup=2),
        case("synchronous only", pipe=2, warmup=4),
        case("one patch", pipe=2, patches=1),
        case("multistep", pipe=2, sampler="dpmpp_2m", patches=3),
        case("with previews", pipe=2, patches=3, preview=True),
        case("bfloat16", steps=2, pipe=2, patches=3, dtype="bfloat16"),  # timesteps that bfloat16 has
    ],
    4: [
        case("four stages", pipe=4, patches=4),
        case("with ulysses", pipe=2, ulysses=2, patches=3, latent=(14, 5)),
        case("with ring", pipe=2, ring=2, patches=3, latent=(14, 5)),
        case("with cfg", pipe=2, cfg=2, texts=[5, 3], patches=3),
        case("with data", pipe=2, data=2, batch=3),
    ],
}


PARTS = 4
"""Of the meshes of eight ranks: all in one test come close to its time limit where two cores run them; CI has one."""


def every_mesh(ranks: int, seed: int) -> list[dict[str, Any]]:
    """A case for every mesh with stages that fits; sizes, texts, patches and samplers drawn from the seed."""
    draw = random.Random(seed)
    cases = []
    for data, cfg, pipe, ring, ulysses in itertools.product((1, 2), (1, 2), *[range(1, ranks + 1)] * 3):
        if pipe == 1 or data * cfg * pipe * ring * ulysses > ranks:
            continue
        rows, columns = draw.choice((6, 7, 12)), draw.choice((3, 5))
        most = max(1, rows // math.ceil(ring * ulysses / columns))  # every patch has a token for each rank
        cases.append(
            case(
                f"data {data}, cfg {cfg}, pipe {pipe}, ring {ring}, ulysses {ulysses}",
                data=data,
                cfg=cfg,
                pipe=pipe,
                ring=ring,
                ulysses=ulysses,
                patches=min(draw.randint(1, 6), most),
                warmup=draw.randint(1, 2),
                latent=(2 * rows, 2 * columns - draw.randint(0, 1)),
                texts=draw.choice(([5, 3], [4, 7]) if cfg == 2 else ([5], [9], [5, 3])),
                batch=draw.randint(1, 3),
                sampler=draw.choice(SUPPORTED),
            )
        )
    return cases


@pytest.mark.slow
@pytest.mark.parametrize(
    "world_size", [pytest.param(size, marks=pytest.mark.long if size > 2 else ()) for size in CASES]
)
def test_stages_equal_the_emulated_schedule(world_size, monkeypatch):
    compare(world_size, CASES[world_size], monkeypatch)


@pytest.mark.slow
@pytest.mark.parametrize("part", [0, *(pytest.param(part, marks=pytest.mark.long) for part in range(1, PARTS))])
def test_every_mesh_that_fits_eight_ranks_equals_the_emulated_schedule(part, monkeypatch):
    cases = every_mesh(8, seed=1)
    assert len(cases) > 25
    compare(8, cases[part::PARTS], monkeypatch)


def emulated(each: dict[str, Any], monkeypatch: Any) -> torch.Tensor:
    """What stages make of a case, in one process."""
    request = sample_request(each)
    return emulate(
        monkeypatch,
        whole_transformer(getattr(torch, each.get("dtype", "float32"))),
        **make_inputs(each),
        cfg=request.cfg,
        sampler=request.sampler,
        patches=each["plan"]["patches"],
        warmup=each["plan"]["warmup_steps"],
    )


def compare(world_size: int, cases: list[dict[str, Any]], monkeypatch: Any) -> None:
    """Run the cases on that many ranks and against the emulator."""
    found = run_ranks(world_size, "tests.parallel_runtime.staged_run:run_cases", {"cases": cases})[0]
    for each in cases:
        expected = emulated(each, monkeypatch)
        limit = 1e-2 if "dtype" in each else 1e-5
        assert relative_error(found[each["name"]], expected) < limit, each


@pytest.mark.long_but_for("2")
@pytest.mark.slow
@pytest.mark.parametrize("world_size", [2, 4])
def test_every_family_is_cut_by_its_data_alone(world_size):
    """The patches of one stage are the oracle of several: FLUX's own emulator pins those to the published schedule."""
    plans = {2: [{"pipe": 2}], 4: [{"pipe": 4}, {"pipe": 2, "ulysses": 2}, {"pipe": 2, "ring": 2}]}[world_size]
    found = run_ranks(
        world_size,
        "tests.parallel_runtime.staged_families:run_on_pipeline",
        {"plans": dict.fromkeys(STAGED, plans)},
    )[0]
    for name, family in STAGED.items():
        expected = run_alone(family)
        for number, plan in enumerate(plans):
            assert relative_error(found[f"{name} {number}"], expected) < 1e-5, (name, plan)


@pytest.mark.long
def test_compiled_stages_have_no_graph_breaks_and_give_the_same(monkeypatch):
    compiled = case("compiled", pipe=2, patches=3, latent=(14, 5), steps=3)
    found = run_ranks(2, "tests.parallel_runtime.staged_run:run_cases", {"cases": [compiled], "compile": True})[0]
    assert relative_error(found["compiled"], emulated(compiled, monkeypatch)) < 1e-5


def test_a_whole_model_runs_in_stages_and_without_in_turn():
    outputs = run_ranks(2, "tests.parallel_runtime.staged_run:run_in_turn")[0]
    assert len(outputs) == 4
    for output in outputs.values():
        assert relative_error(output, outputs["0"]) < 1e-5


def test_an_error_in_a_stage_comes_out_at_once_and_waits_for_no_other_stage(monkeypatch):
    """The others may never send or vote again: waiting for them would hide the error behind a stall."""

    def fail(*_: Any, **__: Any) -> None:
        raise torch.OutOfMemoryError("no room on this stage")

    def wait(*_: Any) -> None:
        raise AssertionError("waited for another stage")

    monkeypatch.setattr(ParallelTransformer, "predict", fail)
    monkeypatch.setattr(Outbox, "flush", wait)
    monkeypatch.setattr(StopVotes, "close", wait)
    with pytest.raises(torch.OutOfMemoryError, match="no room on this stage"):
        run_alone(STAGED["PixArt"])
