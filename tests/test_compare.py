"""benchmarks/compare.py: peers agree on the same weights and inputs, and a peer that cannot run costs one line."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import psutil
import pytest
import torch

from benchmarks.compare import compare_latents, run_cases
from benchmarks.peers.case import EXTRA_PEERS, PEERS, Case, plan_cases
from benchmarks.peers.launch import run_case
from benchmarks.peers.report import table
from tests.comfyui_checkout import HOW, find_comfyui

COMFYUI = find_comfyui()


def tiny(peer: str, ranks: int, comfyui: str = "") -> Case:
    """A case on CPUs."""
    (case,) = plan_cases([peer], [ranks], [64], tiny=True, comfyui=comfyui, limit=100)
    return case


@pytest.fixture(scope="module")
def rows() -> dict[tuple[str, int], dict[str, Any]]:
    cases = [tiny("ours", 1), tiny("ours", 2), tiny("diffusers", 2), tiny("nobody", 2)]
    if COMFYUI:
        cases.append(tiny("comfyui", 1, str(COMFYUI)))
    measured = run_cases(cases, seconds=250, on_row=lambda rows: None)
    return {(row["peer"], row["ranks"]): row for row in measured}


@pytest.mark.parametrize(
    ("peer", "ranks"),
    [
        ("ours", 2),
        ("diffusers", 2),
        pytest.param("comfyui", 1, marks=[pytest.mark.host, pytest.mark.skipif(COMFYUI is None, reason=HOW)]),
    ],
)
def test_a_peer_gives_the_latent_of_ours_on_one_rank(rows, peer, ranks):
    row = rows[peer, ranks]
    assert row.get("reason") is None
    assert row["reference"] == ["ours", 1]
    assert row["distance"] < 1e-5
    assert row["agrees"]
    assert row["ms_per_step"] > 0


def test_an_unknown_peer_is_a_line_with_its_reason(rows):
    assert rows["nobody", 2]["reason"].startswith("unknown; the peers are ours,")
    lines = table(list(rows.values())).splitlines()
    assert "| nobody | – | (1) |" in lines
    assert any(line.startswith("1. nobody: unknown") for line in lines)


def test_a_peer_that_fails_is_a_line_with_its_reason(tmp_path):
    row, latent = run_case(tiny("comfyui", 1, str(tmp_path)))
    assert latent is None
    assert row["reason"] == f"no ComfyUI in '{tmp_path}': give its folder by --comfyui or $COMFYUI_PATH"


def test_a_peer_that_hangs_is_ended_with_all_its_ranks():
    row, latent = run_case(replace(tiny("ours", 2), limit=0.3))
    assert latent is None
    assert row["reason"] == "took longer than 0.3 s"
    left = [child.cmdline() for child in psutil.Process().children(recursive=True)]
    assert not [command for command in left if "benchmarks.peers.ours" in command]


def test_what_there_is_no_time_for_is_left_out_and_says_so():
    (row,) = run_cases([tiny("ours", 1)], seconds=0, on_row=lambda rows: None)
    assert row["reason"].startswith("left out")


@pytest.mark.parametrize("wrong", [1.1, float("nan")])
def test_an_output_that_does_not_agree_is_marked(wrong):
    row = {"ms_per_step": 50.0, "first_step_s": 1.0, "peak_gib": None, "settings": "", "size": 1024, "device": "CPU"}
    rows = [{**row, "peer": name, "ranks": ranks} for name, ranks in [("diffusers", 2), ("ours", 1), ("xdit", 2)]]
    latent = torch.ones(1, 16, 2, 2)
    latents = {("diffusers", 2, 1024): latent * 1.001, ("ours", 1, 1024): latent, ("xdit", 2, 1024): latent * wrong}
    compare_latents(rows, latents, limit=0.02)
    assert [row["agrees"] for row in rows] == [True, True, False]
    assert rows[0]["distance"] == pytest.approx(0.001, rel=0.01)
    assert "50.0 ≠ (" in table(rows)


def test_cases_respect_what_a_peer_can_use_and_come_in_order_of_interest():
    cases = plan_cases(list(PEERS), [1, 2, 4], [1024, 2048], tiny=False, comfyui="", limit=100)
    assert {case.ranks for case in cases if case.peer.startswith("comfyui")} == {1}
    assert {case.ranks for case in cases if case.peer.startswith("xdit")} == {2, 4}
    assert {case.ranks for case in cases if case.size == 2048} == {1, 4}
    extra = [case.peer in EXTRA_PEERS for case in cases]
    assert extra == sorted(extra)
    assert len(cases) == len(set(cases))
