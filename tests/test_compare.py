"""benchmarks/compare.py: rivals agree on the same weights and inputs, and a rival that cannot run costs one line."""

from __future__ import annotations

from typing import Any

import psutil
import pytest
import torch

from benchmarks.compare import run_cases
from benchmarks.rivals.case import RIVALS, Case
from benchmarks.rivals.plan import EXTRA_RIVALS, SETS, Setting, plan_cases, plan_set
from benchmarks.rivals.report import merge, table
from benchmarks.rivals.results import compare_latents
from tests.comfyui_checkout import HOW, find_comfyui

COMFYUI = find_comfyui()


def tiny(rival: str, ranks: int, comfyui: str = "", limit: float = 100) -> Case:
    """A case on CPUs."""
    setting = Setting(tiny=True, comfyui=comfyui, limit=limit)
    (case,) = plan_cases([rival], [ranks], [64], setting)
    return case


def measure(*cases: Case, seconds: float = 250, places: int | None = None) -> list[dict[str, Any]]:
    """The rows of some cases; by default there are as many places as the widest case needs."""
    return run_cases(list(cases), seconds, lambda rows, row: None, places)


@pytest.fixture(scope="module")
def rows() -> dict[tuple[str, int], dict[str, Any]]:
    cases = [tiny("ours", 2), tiny("diffusers", 2), tiny("nobody", 2), tiny("ours-ring", 2), tiny("ours-pipefusion", 2)]
    cases.append(tiny("ours", 1))
    if COMFYUI:
        cases.append(tiny("comfyui", 1, str(COMFYUI)))
    return {(row["rival"], row["ranks"]): row for row in measure(*cases)}


@pytest.mark.long
@pytest.mark.parametrize(
    ("rival", "ranks"),
    [
        ("ours", 2),
        ("ours-ring", 2),
        ("diffusers", 2),
        pytest.param("comfyui", 1, marks=[pytest.mark.host, pytest.mark.skipif(COMFYUI is None, reason=HOW)]),
    ],
)
def test_a_rival_gives_the_latent_of_ours_on_one_rank(rows, rival, ranks):
    row = rows[rival, ranks]
    assert row.get("reason") is None
    assert row["reference"] == ["ours", 1]
    assert row["distance"] < 1e-5
    assert row["agrees"]
    assert row["ms_per_step"] > 0


@pytest.mark.long
def test_a_pipeline_comes_near_to_the_latent_of_one_rank_and_says_that_it_differs(rows):
    row = rows["ours-pipefusion", 2]
    assert row.get("reason") is None
    assert row["reference"] == ["ours", 1]
    assert 1e-4 < row["distance"] < 0.3
    (line,) = [line for line in table([row]).splitlines() if "(picture)" in line]
    assert " ~ | ours on 1 |" in line


@pytest.mark.long
def test_rows_are_in_the_order_of_the_table_though_references_ran_first(rows):
    assert list(rows)[:5] == [
        ("ours", 2),
        ("diffusers", 2),
        ("nobody", 2),
        ("ours-ring", 2),
        ("ours-pipefusion", 2),
    ]


@pytest.mark.long
def test_an_unknown_rival_is_a_line_with_its_reason(rows):
    assert rows["nobody", 2]["reason"].startswith("unknown; the rivals are ours,")
    lines = table(list(rows.values())).splitlines()
    assert "| nobody | – | (1) |" in lines
    assert any(line.startswith("1. nobody: unknown") for line in lines)


@pytest.mark.long
def test_a_rival_that_fails_and_one_that_hangs_are_lines_and_leave_no_process(tmp_path):
    hanging, failing = measure(tiny("ours", 2, limit=0.3), tiny("comfyui", 1, str(tmp_path)), places=3)
    assert hanging["reason"] == "took longer than 0.3 s"
    assert failing["reason"] == f"no ComfyUI in '{tmp_path}': give its folder by --comfyui or $COMFYUI_PATH"
    left = [child.cmdline() for child in psutil.Process().children(recursive=True)]
    assert not [command for command in left if "benchmarks.rivals.process" in command]


def test_what_there_is_no_time_for_is_left_out_and_says_so():
    (row,) = measure(tiny("ours", 1), seconds=0)
    assert row["reason"].startswith("left out")


def row_of(rival: str, ranks: int, steps: int = 10, pipelined: bool = False) -> dict[str, Any]:
    """A row without what `compare_latents` adds."""
    row = {"ms_per_step": 50.0, "first_step_s": 1.0, "peak_gib": None, "settings": "", "size": 1024, "device": "CPU"}
    return {**row, "rival": rival, "ranks": ranks, "steps": steps, "pipelined": pipelined}


@pytest.mark.parametrize("wrong", [1.1, float("nan")])
def test_an_output_that_does_not_agree_is_marked(wrong):
    latent = torch.ones(1, 16, 2, 2)
    measured = [
        (row_of("diffusers", 2), latent * 1.001),
        (row_of("ours", 1), latent),
        (row_of("xdit", 2), latent * wrong),
    ]
    compare_latents(measured, limit=0.02)
    rows = [row for row, _ in measured]
    assert [row["agrees"] for row in rows] == [True, True, False]
    assert rows[0]["distance"] == pytest.approx(0.001, rel=0.01)
    assert "50.0 ≠ (" in table(rows)


def test_a_pipeline_is_compared_after_as_many_steps_and_may_differ_but_not_be_nothing():
    latent = torch.ones(1, 16, 2, 2)
    near = (row_of("ours-pipefusion", 4, 28, pipelined=True), latent * 3.3)
    lost = (row_of("xdit-pipefusion", 4, 28, pipelined=True), latent * float("nan"))
    picture = (row_of("ours-picture", 1, 28), latent * 3)
    compare_latents([near, lost, (row_of("ours", 1), latent), picture], limit=0.02)
    assert near[0]["reference"] == ["ours-picture", 1]
    assert near[0]["distance"] == pytest.approx(0.1, rel=0.01)
    assert (near[0]["agrees"], lost[0]["agrees"]) == (True, False)


def test_cases_respect_what_a_rival_can_use_and_come_in_order_of_interest():
    cases = plan_cases(list(RIVALS), [1, 2, 4], [1024, 2048], Setting(tiny=False, comfyui="", limit=100))
    assert {case.ranks for case in cases if case.rival.startswith("comfyui")} == {1}
    assert {case.ranks for case in cases if case.rival.startswith("xdit")} == {2, 4}
    assert {case.ranks for case in cases if case.size == 2048} == {1, 4}
    extra = [case.rival in EXTRA_RIVALS for case in cases]
    assert extra == sorted(extra)
    assert len(cases) == len(set(cases))


@pytest.mark.parametrize("name", SETS)
def test_a_set_has_each_case_once_and_for_each_a_reference_of_its_size_and_steps(name):
    setting = Setting(tiny=False, comfyui="", limit=100)
    for cases in (plan_set(name, setting, None, None, None), plan_set(name, setting, ["ours"], [4], [2048])):
        assert len(cases) == len(set(cases))
        references = {(case.size, case.steps) for case in cases if case.is_reference}
        assert references == {(case.size, case.steps) for case in cases}
        assert all(RIVALS[case.rival].least <= case.ranks <= RIVALS[case.rival].most for case in cases)


def test_rows_are_added_to_those_of_an_earlier_run_and_a_reason_replaces_no_number():
    def row(rival: str, **told: Any) -> dict[str, Any]:
        return {"rival": rival, "ranks": 4, "size": 1024, **told}

    before = [row("ours", ms_per_step=40.0), row("xdit", ms_per_step=88.0), row("comfyui", reason="no ComfyUI")]
    now = [row("xdit", reason="left out"), row("ours", ms_per_step=39.0), row("comfyui", ms_per_step=190.0)]
    assert merge(before, now) == [before[1], *now[1:]]
    assert merge(before, [row("diffusers", ms_per_step=54.0)]) == [*before, row("diffusers", ms_per_step=54.0)]
