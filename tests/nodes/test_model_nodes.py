"""Every node of ComfyUI that takes a MODEL has a row that says what becomes of it, and the row is true."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.node_distances import wrong
from benchmarks.template_coverage.node_types import NODE_TYPES, Effect
from benchmarks.works_with import MEASURED, MODEL_NODES, PAGE, RESULTS, How, write_measured, write_page
from parallel_runtime.networks.comfyui.node_rules import GUIDANCE_RULES, PATCH_RULES
from tests.comfyui_checkout import HOW, find_comfyui
from tests.host.find_host import SHIM

COMFYUI = find_comfyui()
OLDER = Path.home() / "ComfyUI080"


def takers(comfyui: Path) -> set[str]:
    """Nodes of a ComfyUI that take a MODEL."""
    script = Path(__file__).parents[1] / "comfyui_networks" / "model_nodes.py"
    environment = {**os.environ, "PYTHONPATH": str(SHIM)}
    done = subprocess.run(
        [sys.executable, str(script), str(comfyui)],
        cwd=comfyui, env=environment, capture_output=True, text=True, timeout=600, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    return set(json.loads(done.stdout.splitlines()[-1]))


@pytest.mark.slow
@pytest.mark.skipif(COMFYUI is None, reason=HOW)
def test_every_node_that_takes_a_model_has_a_row():
    assert COMFYUI is not None
    found = takers(COMFYUI)
    assert len(found) > 60
    assert not found - MODEL_NODES.keys(), "say in benchmarks/works_with.py what becomes of these"


@pytest.mark.slow
@pytest.mark.skipif(COMFYUI is None or not (OLDER / "main.py").is_file(), reason="no ComfyUI 0.8 in ComfyUI080")
def test_every_node_of_an_older_comfyui_has_a_row():
    assert not takers(OLDER) - MODEL_NODES.keys()


def test_nodes_whose_functions_are_made_again_are_those_of_the_ranks_table():
    rebuilt = {name for name, node in MODEL_NODES.items() if node.how is How.REBUILT}
    by_another = {"SkipLayerGuidanceSD3"}  # which calls SkipLayerGuidanceDiT
    assert rebuilt - by_another == {rule.node for rule in PATCH_RULES.values()}
    guide = {name for name, node in MODEL_NODES.items() if node.how is How.GUIDES}
    assert guide == {rule.node for rule in GUIDANCE_RULES.values()} - rebuilt - {"LTXVDualCFGGuider"}


def test_what_is_refused_says_why_and_templates_are_judged_alike():
    for name, node in MODEL_NODES.items():
        assert node.how is not How.REFUSED or node.why, name
    for name, kind in NODE_TYPES.items():
        if name in MODEL_NODES:
            assert (kind.effect is Effect.OUTSIDE) == (MODEL_NODES[name].how is not How.REFUSED), name


def test_what_was_measured_is_as_the_table_says():
    results = json.loads(RESULTS.read_text(encoding="utf-8"))
    assert results
    for version, found in results.items():
        measured = {name for name, each in found.items() if "distance" in each}
        assert len(measured) > 20, version
        assert not wrong(found), version


def test_the_pages_are_made_of_the_table_and_the_results():
    assert PAGE.read_text(encoding="utf-8") == write_page(), "run: python -m benchmarks.works_with"
    assert MEASURED.read_text(encoding="utf-8") == write_measured(), "run: python -m benchmarks.works_with"
