"""ComfyUI's own networks, their tokens shared out over ranks: against the same class in one process."""

from __future__ import annotations

import math

import pytest

from parallel_runtime.networks.tables.comfyui import NETWORKS
from tests.comfyui_checkout import HOW, find_comfyui
from tests.comfyui_networks.batch_alone import BATCH
from tests.comfyui_networks.catalogue import TINY
from tests.ranks import run_ranks

COMFYUI = find_comfyui()
pytestmark = pytest.mark.skipif(COMFYUI is None, reason=HOW)
PLANS = {2: [[2, 1], [1, 2]], 3: [[3, 1], [1, 3]]}
USED_MOST = ["flux2", "qwen-image", "wan t2v", "z-image", "ltx-2", "krea 2", "minimax h3", "ltx-2.5"]
# What ComfyUI lists among its models, and is no network that denoises.
NO_DIFFUSION = {
    "comfy.ldm.rt_detr.rtdetr_v4:RTv4": "finds objects",
    "comfy.ldm.depth_anything_3.model:DepthAnything3Net": "measures depth",
    "comfy.ldm.sam3.detector:SAM3Model": "finds outlines",
}


def compare(ranks: int, names: list[str], plans: list[list[int]] | None = None) -> set[str]:
    """Assert that so many ranks compute what one does, by these plans or all; return the classes."""
    arguments = {"comfyui": str(COMFYUI), "names": names, "plans": plans or PLANS[ranks]}
    found = run_ranks(ranks, "tests.comfyui_networks.ranks:compare", arguments)
    for each in found:
        differences = each["differences"]
        wrong = {
            (name, case): diff for name, cases in differences.items() for case, diff in cases.items() if not diff < 1e-5
        }
        assert not wrong
        assert set(differences) == set(names)
        assert all(differences.values())
    return set(found[0]["classes"])


CUT = {name for name, data in NETWORKS.items() if data.blocks and not data.read}


@pytest.mark.slow
def test_three_ranks_compute_what_one_does_with_every_class_by_either_plan():
    """Both plans of each are in the tests before a release."""
    found = [compare(3, list(TINY)[number::2], [plan]) for number, plan in enumerate(PLANS[3])]
    assert set.union(*found) == CUT


@pytest.mark.long
@pytest.mark.parametrize("ranks", PLANS)
def test_ranks_compute_what_one_does_with_every_class(ranks):
    assert compare(ranks, list(TINY)) == CUT


@pytest.mark.slow
def test_ranks_compute_what_one_does_with_the_classes_that_are_used_most():
    assert len(compare(2, USED_MOST)) >= 6


def test_plans_reckon_with_the_products_that_a_forward_has():
    names = [
        "flux",
        "flux2",
        "qwen-image",
        "chroma",
        "sd3.5 large",
        "z-image",
        "wan t2v",
        "ltx-video",
        "hunyuan video 1.5",
    ]
    (ratios,) = run_ranks(1, "tests.comfyui_networks.described:compare", {"comfyui": str(COMFYUI), "names": names})
    assert {name: ratio for name, ratio in ratios.items() if not 0.9 < ratio < 1.1} == {}
    assert set(ratios) == set(names)


def test_plans_know_the_blocks_whose_exchange_hides_behind_products():
    names = ["flux", "flux2", "chroma", "qwen-image", "z-image", "lumina 2"]
    (found,) = run_ranks(1, "tests.comfyui_networks.described:hiding", {"comfyui": str(COMFYUI), "names": names})
    flux, others = [[2, 0, 0, 0], [4, 4, 4, 0]], [[0, 0, 0, 0], [3, 3, 3, 0]]
    assert found == {"flux": flux, "flux2": flux, "chroma": flux, "qwen-image": others} | {
        "lumina 2": [[0, 0, 0, 0], [0, 0, 0, 0]],
        "z-image": [[0, 0, 0, 0], [4, 4, 4, 0]],
    }


def test_every_model_of_comfyui_is_known():
    (found,) = run_ranks(1, "tests.comfyui_networks.inventory:inventory", {"comfyui": str(COMFYUI)})
    networks, known = found["networks"], {*NETWORKS, *NO_DIFFUSION}
    assert len(networks) > 80
    new = {model: network for model, network in networks.items() if network not in known}
    assert not new, f"batch axes only, until there are data for them, or why not: {new}"
    assert not found["gone"], "the table has classes that this ComfyUI has not"
    assert not set(NO_DIFFUSION) - set(networks.values())


def test_a_network_is_cut_or_said_why_not():
    for name, data in NETWORKS.items():
        assert bool(data.blocks) != bool(data.whole), name


@pytest.mark.slow
@pytest.mark.parametrize(("ranks", "plan"), [(2, {"cfg": 2}), (3, {"data": 3})])
def test_ranks_share_out_the_batch_where_tokens_cannot_be(ranks, plan):
    found = run_ranks(ranks, "tests.comfyui_networks.batch_alone:compare", {"comfyui": str(COMFYUI), "plan": plan})
    wrong = {
        (name, case): each[case]["difference"]
        for own in found
        for name, each in own.items()
        for case in set(each) - {"at once"}
        if not each[case]["difference"] < 1e-5
    }
    assert not wrong
    for name, each in found[0].items():
        for case, branches in {"one branch": 1, "two branches": 2, "both in a call": 2}.items():
            rows = [own[name][case]["rows"] for own in found]
            assert sum(rows) == BATCH * branches, name
            assert all(count % each["at once"] == 0 for count in rows), name
            assert rows[0] <= math.ceil(BATCH * branches / ranks / each["at once"]) * each["at once"], name


@pytest.mark.long
def test_rows_of_a_batch_are_computed_alike_wherever_it_is_cut():
    (found,) = run_ranks(1, "tests.comfyui_networks.cut_batches:compare", {"comfyui": str(COMFYUI)})
    assert len(found["differences"]) > 150
    assert not {case: difference for case, difference in found["differences"].items() if not difference < 1e-5}
