"""Every published step is predicted by the cost model, and results are read as they are written."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from benchmarks.fit_cost import RESULTS, Measured, parse_plan, read_results, table
from parallel_runtime.config import AXES, ParallelPlan
from parallel_runtime.planning import cost_constants


def test_every_published_step_is_predicted_within_a_fifth():
    steps = read_results(sorted(RESULTS.glob("*.json")))
    assert {step.source for step in steps} >= {"compare.json", "flux_step.json", "pipefusion_step.json"}
    assert len(steps) >= 38
    assert {step.size for step in steps} >= {512, 1024, 2048}
    for kind in ({"ring"}, {"pipe"}, {"pipe", "ulysses"}, {"ulysses"}):
        assert any({axis for axis in AXES if getattr(step.plan, axis) > 1} == kind for step in steps), kind
    wrong = [step for step in steps if abs(step.error()) > 0.2]
    assert not wrong, table(wrong)


def test_exact_plans_of_todays_engine_over_nvlink_are_predicted_within_a_twentieth():
    steps = read_results(sorted(RESULTS.glob("*.json")))
    exact = [step for step in steps if step.plan.pipe == 1 and step.compiled and step.p2p]
    assert len(exact) >= 14
    wrong = [step for step in exact if abs(step.error()) > 0.05]
    assert not wrong, table(wrong)


FITTED_TO = {
    ("PASSES", True): "compare.json",
    ("PASSES", False): "flux_step.json",
    ("ROWS_LOST",): "compare.json",
    ("BLOCK_SECONDS", True): "compare.json",
    ("BLOCK_SECONDS", False): "flux_step.json",
    ("STEP_SECONDS",): "compare.json",
    ("MEETING_SECONDS",): "compare.json",
    ("COLLECTIVE_SECONDS",): "pipefusion_step.json",
    ("PATCH_SECONDS",): "pipefusion_step.json",
    ("ROWS_OF_A_WAVE",): "pipefusion_step.json",
    ("LIVE_ACTIVATIONS",): "pipefusion_step.json",
    ("EXCHANGE_BUFFERS",): "pipefusion_step.json",
    ("CONTEXT_BYTES",): "pipefusion_step.json",
}
"""Constants, with the key of those that are several, and the file that each was fitted to."""


def test_every_other_constant_was_counted_or_estimated():
    lines = Path(cost_constants.__file__).read_text().splitlines()
    found = [line for line in lines if re.match(r"([A-Z_0-9]+ =|    (True|False):) [^{]+$", line)]
    fitted = [line for line in found if re.search(r"; \w+\.json: ", line)]
    assert [re.search(r"; (\w+\.json): ", line)[1] for line in fitted] == list(FITTED_TO.values())
    assert all(re.search("; (counted|estimated)", line) for line in found if line not in fitted)


@pytest.mark.parametrize("constant", FITTED_TO, ids=str)
def test_a_fitted_constant_counts_in_the_results_that_it_names(constant, monkeypatch):
    """Were another file named, or the constant not used, no prediction of that file would change with it."""
    steps = [step for step in read_results(sorted(RESULTS.glob("*.json"))) if step.source == FITTED_TO[constant]]
    before = [(step.predicted(), step.predicted_bytes()) for step in steps]
    name, *key = constant
    value = getattr(cost_constants, name)
    if key:
        monkeypatch.setitem(value, key[0], 2 * value[key[0]])
    else:
        monkeypatch.setattr(cost_constants, name, 2 * value)
    assert [(step.predicted(), step.predicted_bytes()) for step in steps] != before


def test_of_an_older_engine_only_steps_stay_that_no_other_file_has(tmp_path):
    old = [("1 GPU", 1024, 172.0), ("1 GPU, compiled", 1024, 125.0), ("1 GPU, compiled", 512, 39.0)]
    rows = [{"engine": f"Parallel DiT, {engine}", "size": size, "ms_per_step": ms} for engine, size, ms in old]
    newer = {"rival": "ours", "ranks": 1, "size": 1024, "p2p": True, "ms_per_step": 124.0}
    for name, content in (("flux_step.json", rows), ("compare.json", [newer]), ("again.json", [newer])):
        (tmp_path / name).write_text(json.dumps({"rows": content}))
    steps = read_results(sorted(tmp_path.glob("*.json")))
    assert [(step.source, step.milliseconds) for step in steps] == [
        ("again.json", 124.0),
        ("compare.json", 124.0),
        ("flux_step.json", 172.0),
        ("flux_step.json", 39.0),
    ]


@pytest.mark.parametrize(
    "plan",
    [
        ParallelPlan(),
        ParallelPlan(data=2, cfg=2, ring=3, ulysses=4),
        ParallelPlan(pipe=4, patches=8, warmup_steps=1),
        ParallelPlan(cfg=2, pipe=2, ulysses=2, patches=3, warmup_steps=4),
    ],
)
def test_a_plan_is_read_as_it_is_written(plan):
    assert parse_plan(str(plan)) == plan
    assert parse_plan(str(plan).replace("stages", "pipe")) == plan


def test_rows_of_every_benchmark_are_read_and_those_of_others_are_left_out(tmp_path):
    rows = [
        {"engine": "Parallel DiT, 2 GPUs, compiled", "size": 512, "ms_per_step": 30.0},
        {"engine": "diffusers, 1 GPU, eager, SDPA", "size": 512, "ms_per_step": 90.0},
        {"plan": "pipe 4 (4 patches, 1 warm-up step)", "graphs": True, "p2p": False, "step_512_ms": 21.0},
        {"plan": "pipe 4 (4 patches, 1 warm-up step)", "graphs": False, "p2p": False, "step_512_ms": 55.0},
        {"plan": "ring 2", "size": 768, "ms": 44.0, "compiled": False, "steps": 9},
        {
            "rival": "ours-pipefusion-ulysses",
            "ranks": 4,
            "size": 1024,
            "p2p": True,
            "ms_per_step": 50.0,
            "steps": 28,
        },
        {"rival": "ours", "ranks": 4, "size": 2048, "reason": "out of time"},
        {"rival": "xdit", "ranks": 4, "size": 1024, "ms_per_step": 88.0},
    ]
    path = tmp_path / "made.json"
    path.write_text(json.dumps({"machine": "4 x NVIDIA H200, torch 2.13", "rows": rows}))
    (tmp_path / "other.json").write_text("[1, 2]")
    staged = {"patches": 4, "warmup_steps": 1}

    def step(plan: ParallelPlan, size: int, milliseconds: float, compiled=True, p2p=True, steps=28) -> Measured:
        return Measured(path.name, "4 x NVIDIA H200, torch 2.13", plan, size, compiled, p2p, steps, milliseconds)

    assert read_results([path, tmp_path / "other.json"]) == [
        step(ParallelPlan(ulysses=2), 512, 30.0),
        step(ParallelPlan(pipe=4, **staged), 512, 21.0, p2p=False),
        step(ParallelPlan(ring=2), 768, 44.0, compiled=False, steps=9),
        step(ParallelPlan(pipe=2, ulysses=2, patches=2, warmup_steps=1), 1024, 50.0),
    ]


def test_the_table_has_both_numbers_and_the_error_of_every_row():
    step = Measured("x.json", "NVIDIA H200", ParallelPlan(), 1024, True, True, 28, 100.0)
    row = table([step]).splitlines()[-1]
    assert f"| 100.0 | {step.predicted():.1f} | {step.predicted() - 100:+.1f} % | x.json |" in row
